"""Draws one token for each sampled row of a step.

The order is vLLM's: ends masked by min_tokens, bias, penalties (repetition, frequency, presence),
temperature, min-p, top-k, top-p. Min-p comes before top-p, so that the nucleus is one of what
min-p leaves. Greedy rows take the largest logit after the penalties. Logprobs are of the raw
logits, before all of it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.protocol import TokenLogprob
from engine.sampling.adjustments import adjust
from engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p
from engine.sampling.inverse import invert
from engine.sampling.logprobs import token_logprobs
from engine.sampling.noise import uniform
from engine.sampling.row import SamplingRow
from engine.scheduler.plan import SampledToken

__all__ = ["SampledToken", "SamplingRow", "sample"]


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Draw a token for each row of logits [num_rows, vocab], in fp32; logits stay as they are.

    A row's result depends on its logits and its SamplingRow, and on no other row. A row whose
    largest logit isn't finite (a NaN or +inf anywhere, or -inf everywhere) gets no token.
    """
    assert logits.shape[0] == len(rows)
    token_ids: list[int | None] = [None] * len(rows)
    for indices, group in _groups(logits, rows):
        chosen = _choose(group, [rows[i] for i in indices])
        for i, token_id in zip(indices, chosen, strict=True):
            token_ids[i] = token_id
    logprobs = _logprobs(logits, rows, token_ids)
    return [
        SampledToken(token_id=token_id, logprobs=logprobs.get(i))
        for i, token_id in enumerate(token_ids)
    ]


def _groups(logits: Tensor, rows: Sequence[SamplingRow]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the rows that want their logits as they are, uncopied if all do; then the others."""
    plain = [i for i, row in enumerate(rows) if not row.is_adjusted]
    if plain:
        yield plain, _take_rows(logits, plain)
    adjusted = [i for i, row in enumerate(rows) if row.is_adjusted]
    if adjusted:
        group = logits[torch.tensor(adjusted, device=logits.device)]  # a copy
        adjust(group, [rows[i] for i in adjusted])
        yield adjusted, group


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    """Return a token for each row of logits [num_rows, vocab], which are adjusted already."""
    best = logits.max(dim=-1)  # values carry a NaN from anywhere in the row
    # Asked in one go, since a device is waited for each time: -1 where nothing can be drawn.
    likeliest: list[int] = best.indices.where(best.values.isfinite(), -1).tolist()
    token_ids = [None if token_id < 0 else token_id for token_id in likeliest]
    drawn = [i for i, row in enumerate(rows) if likeliest[i] >= 0 and not row.is_greedy]
    if drawn:
        shifted = _take_rows(logits, drawn) - _take_rows(best.values.unsqueeze(-1), drawn)
        for i, token_id in zip(drawn, _draw(shifted, [rows[i] for i in drawn]), strict=True):
            token_ids[i] = token_id
    return token_ids


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw from logits [num_rows, vocab] whose largest is 0 in each row."""
    temperature = torch.tensor([[row.params.temperature] for row in rows], device=logits.device)
    kept = keep_min_p(logits / temperature, [row.params.min_p for row in rows])
    kept = keep_top_k(kept, [row.params.top_k for row in rows])
    probs = keep_top_p(kept.softmax(-1), [row.params.top_p for row in rows])
    noise = [uniform(row.seed, row.position, sample_index=row.sample_index) for row in rows]
    return invert(probs, noise)


def _logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int | None]
) -> dict[int, list[TokenLogprob]]:
    drawn = {
        i: token_id
        for i, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
        if token_id is not None and row.params.num_logprobs is not None
    }
    if not drawn:
        return {}
    num_top = [rows[i].params.num_logprobs or 0 for i in drawn]
    found = token_logprobs(_take_rows(logits, list(drawn)), list(drawn.values()), num_top)
    return dict(zip(drawn, found, strict=True))


def _take_rows(tensor: Tensor, indices: list[int]) -> Tensor:
    """Return the rows of tensor [num_rows, n] in the order of indices; all of them uncopied."""
    if len(indices) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(indices, device=tensor.device)]
