"""The log probabilities that a client may ask for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.protocol import TokenLogprob


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[list[TokenLogprob]]:
    """Return, per row of logits [num_rows, vocab], the token's logprob, then its `num_top` best.

    Of the raw logits in fp32: before temperature and filters. A token among the best is in the
    list twice, so that the first is always the one that was drawn.
    """
    logprobs = logits.float().log_softmax(-1)  # [num_rows, vocab]
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(-1)  # [num_rows, 1]
    drawn = logprobs.gather(-1, ids).squeeze(-1).tolist()
    best = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    best_ids, best_values = best.indices.tolist(), best.values.tolist()
    return [
        [
            TokenLogprob(token_id, drawn[row]),
            *map(TokenLogprob, best_ids[row][: num_top[row]], best_values[row][: num_top[row]]),
        ]
        for row, token_id in enumerate(token_ids)
    ]
