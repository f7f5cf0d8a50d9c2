"""Draws one token for each sampled row of a step.

The order is vLLM's: ends masked by min_tokens, bias, penalties (repetition, frequency, presence),
temperature, min-p, top-k, top-p. Min-p comes before top-p, so that the nucleus is one of what
min-p leaves. Greedy rows take the largest logit after the penalties. Logprobs are of the raw
logits, before all of it.

Nothing on the way asks the device what it found: all of a step's answers come in one copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.adjustments import adjust
from engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p
from engine.sampling.inverse import invert
from engine.sampling.largest import largest
from engine.sampling.logprobs import pack_logprobs, unpack_logprobs
from engine.sampling.noise import uniform
from engine.sampling.row import SamplingRow
from engine.scheduler.plan import SampledToken
from engine.transfer import download, upload

__all__ = ["SampledToken", "SamplingRow", "sample"]

_NONE = -1  # instead of a token, as long as the host doesn't know


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Draw a token for each row of logits [num_rows, vocab], in fp32; logits stay as they are.

    A row's result depends on its logits and its SamplingRow, and on no other row. A row whose
    largest logit isn't finite (a NaN or +inf anywhere, or -inf everywhere) gets no token.
    """
    assert logits.shape[0] == len(rows)
    token_ids = _choose(_adjusted(logits, rows), rows)  # [num_rows]
    asking = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
    wanted = [token_ids.double()]
    if asking:
        wanted.append(_logprobs(logits, rows, token_ids, asking))
    found, *packed = download(wanted)
    numbers_of = dict(zip(asking, packed[0], strict=True)) if packed else {}
    return [
        _sampled(int(token_id), row, numbers_of.get(i))
        for i, (token_id, row) in enumerate(zip(found, rows, strict=True))
    ]


def _sampled(token_id: int, row: SamplingRow, numbers: list[float] | None) -> SampledToken:
    if token_id == _NONE:
        return SampledToken(token_id=None, logprobs=None)
    if numbers is None:
        return SampledToken(token_id=token_id, logprobs=None)
    num_top = row.params.num_logprobs or 0
    logprobs = unpack_logprobs(numbers, token_id=token_id, num_top=num_top)
    return SampledToken(token_id=token_id, logprobs=logprobs)


def _adjusted(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return what the rows make of their logits; uncopied if none of them asks for anything."""
    if not any(row.is_adjusted for row in rows):
        return logits
    adjusted = logits.clone()
    adjust(adjusted, rows)
    return adjusted


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return a token for each row of logits [num_rows, vocab], which are adjusted already.

    As [num_rows] int64: _NONE where the largest logit isn't finite.
    """
    values, token_ids = largest(logits)
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    if 0 < len(drawn) < len(rows):
        index = upload(drawn, dtype=torch.int64, device=logits.device)  # [num_drawn]
        shifted = logits[index] - values[index].unsqueeze(-1)
        token_ids = token_ids.index_copy(0, index, _draw(shifted, [rows[i] for i in drawn]))
    elif drawn:
        token_ids = _draw(logits - values.unsqueeze(-1), rows)
    return token_ids.where(values.isfinite(), _NONE)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from logits [num_rows, vocab] whose largest is 0 in each row; [num_rows] int64.

    Rows of which nothing can be drawn are all NaN, and get any number.
    """
    temperatures = [[row.params.temperature] for row in rows]
    temperature = upload(temperatures, dtype=logits.dtype, device=logits.device)  # [num_rows, 1]
    kept = keep_min_p(logits / temperature, [row.params.min_p for row in rows])
    kept = keep_top_k(kept, [row.params.top_k for row in rows])
    probs = keep_top_p(kept.softmax(-1), [row.params.top_p for row in rows])
    noise = [uniform(row.seed, row.position, sample_index=row.sample_index) for row in rows]
    return invert(probs, noise)


def _logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: Tensor, asking: Sequence[int]
) -> Tensor:
    """Return pack_logprobs of the rows that ask, as wide as the largest of their wishes."""
    num_top = min(max(rows[i].params.num_logprobs or 0 for i in asking), logits.shape[-1])
    if len(asking) < len(rows):
        index = upload(asking, dtype=torch.int64, device=logits.device)  # [num_asking]
        logits, token_ids = logits[index], token_ids[index]
    return pack_logprobs(logits, token_ids.clamp(min=0), num_top=num_top)
