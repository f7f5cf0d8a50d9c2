"""Draws one token for each sampled row of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import SamplingParams, TokenLogprob
from engine.sampling.filters import keep_top_k, keep_top_p
from engine.sampling.inverse import invert
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import uniform
from engine.scheduler.plan import SampledToken

__all__ = ["SampledToken", "SamplingRow", "sample"]

# Below it the most likely token is taken: a quotient by less says nothing else.
_GREEDY_BELOW_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """How one row is drawn.

    position            index in its sequence of the token being drawn
    sample_index        which of the request's samples
    token_ids           the sequence so far; read, never kept
    num_prompt_tokens   how many of them are the prompt's
    """

    params: SamplingParams
    seed: int
    position: int
    sample_index: int = 0
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature < _GREEDY_BELOW_TEMPERATURE


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Draw a token for each row of logits [num_rows, vocab], in fp32.

    A row's result depends on its logits, params, seed and position, and on no other row. A row
    whose largest logit isn't finite (a NaN or +inf anywhere, or -inf everywhere) gets no token.
    """
    assert logits.shape[0] == len(rows)
    if not rows:
        return []
    best = logits.max(dim=-1)  # values carry a NaN from anywhere in the row
    is_usable = best.values.isfinite().tolist()
    token_ids = best.indices.tolist()
    drawn = [i for i, row in enumerate(rows) if is_usable[i] and not row.is_greedy]
    if drawn:
        chosen = _take_rows(logits, drawn) - _take_rows(best.values.unsqueeze(-1), drawn)
        for i, token_id in zip(drawn, _draw(chosen, [rows[i] for i in drawn]), strict=True):
            token_ids[i] = token_id
    logprobs = _logprobs(logits, rows, token_ids, is_usable)
    return [
        SampledToken(token_id=token_ids[i], logprobs=logprobs.get(i))
        if is_usable[i]
        else SampledToken(token_id=None)
        for i in range(len(rows))
    ]


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw from logits [num_rows, vocab] whose largest is 0 in each row."""
    temperature = torch.tensor([[row.params.temperature] for row in rows], device=logits.device)
    kept = keep_top_k(logits / temperature, [row.params.top_k for row in rows])
    probs = keep_top_p(kept.softmax(-1), [row.params.top_p for row in rows])
    return invert(probs, [uniform(row.seed, row.position) for row in rows])


def _logprobs(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    token_ids: Sequence[int],
    is_usable: Sequence[bool],
) -> dict[int, list[TokenLogprob]]:
    num_top = {
        i: row.params.num_logprobs
        for i, row in enumerate(rows)
        if is_usable[i] and row.params.num_logprobs is not None
    }
    if not num_top:
        return {}
    found = token_logprobs(
        _take_rows(logits, list(num_top)), [token_ids[i] for i in num_top], list(num_top.values())
    )
    return dict(zip(num_top, found, strict=True))


def _take_rows(tensor: Tensor, indices: list[int]) -> Tensor:
    """Return the rows of tensor [num_rows, n] in the order of indices; all of them uncopied."""
    if len(indices) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(indices, device=tensor.device)]
