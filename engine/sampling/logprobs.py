"""The log probabilities that a client may ask for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.protocol import TokenLogprob


def pack_logprobs(logits: Tensor, token_ids: Tensor, *, num_top: int) -> Tensor:
    """Return, per row of logits [num_rows, vocab], its token's logprob, then its best ones.

    token_ids  [num_rows] int64
    num_top    how many best ones; at most the vocabulary

    The result is [num_rows, 1 + 2 * num_top], ids before logprobs, where the logits are. It is in
    fp64, which holds ids and fp32 exactly: the host gets both by one copy. Logprobs are of the raw
    logits in fp32: before temperature and filters.
    """
    logprobs = logits.float().log_softmax(-1)  # [num_rows, vocab]
    drawn = logprobs.gather(-1, token_ids.unsqueeze(-1))  # [num_rows, 1]
    best = logprobs.topk(num_top, dim=-1)
    return torch.cat([drawn.double(), best.indices.double(), best.values.double()], dim=-1)


def unpack_logprobs(numbers: Sequence[float], *, token_id: int, num_top: int) -> list[TokenLogprob]:
    """Return what one row of pack_logprobs says: of the token, then of the `num_top` best.

    A token among the best is in the list twice, so that the first is always the one that was drawn.
    """
    drawn, *best = numbers
    half = len(best) // 2
    best_ids, best_values = best[:half][:num_top], best[half:][:num_top]
    return [
        TokenLogprob(token_id, drawn),
        *(TokenLogprob(int(one), value) for one, value in zip(best_ids, best_values, strict=True)),
    ]
