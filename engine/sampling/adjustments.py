"""What a request asks of its logits before temperature: masks, bias and penalties.

In vLLM's order: tokens that may not come yet, bias, then the penalties for repetition, frequency
and presence. Greedy requests are adjusted too.
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.sampling.row import SamplingRow
from engine.transfer import upload


class _Cells:
    """Places in logits [num_rows, vocab], each named once, with a value for each."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._rows = array("q")
        self._tokens = array("q")
        self._values = array("d")

    def add(self, row: int, value_of: Mapping[int, float]) -> None:
        """Take places of one row: tokens, which the vocabulary must have, and their values."""
        self._rows.extend([row] * len(value_of))
        self._tokens.extend(value_of)
        self._values.extend(value_of.values())

    def is_empty(self) -> bool:
        return not self._rows

    def index(self) -> tuple[Tensor, Tensor]:
        """Where: two tensors of [num_cells]."""
        device = self._logits.device
        rows = upload(self._rows, dtype=torch.int64, device=device)
        return rows, upload(self._tokens, dtype=torch.int64, device=device)

    def values(self) -> Tensor:
        """How much: [num_cells], of the logits' dtype."""
        return upload(self._values, dtype=self._logits.dtype, device=self._logits.device)

    def add_to_logits(self) -> None:
        if not self.is_empty():
            self._logits.index_put_(self.index(), self.values(), accumulate=True)


def adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Change logits [num_rows, vocab] in place as each row asks.

    A value that isn't finite stays so, and a NaN stays a NaN, even in a token that is masked.
    """
    _mask_ends(logits, rows)
    _add_bias(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_use(logits, rows)


def _mask_ends(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    cells = _Cells(logits)
    for i, row in enumerate(rows):
        if row.may_not_end:
            ends = (*row.eos_token_ids, *row.params.stop_token_ids)
            cells.add(i, _known(dict.fromkeys(ends, -math.inf), vocab=logits.shape[-1]))
    cells.add_to_logits()


def _add_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    cells = _Cells(logits)
    for i, row in enumerate(rows):
        cells.add(i, _known(row.params.logit_bias, vocab=logits.shape[-1]))
    cells.add_to_logits()


def _penalise_repetition(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Divide positive logits of tokens in prompt or answer by the penalty, multiply others."""
    cells = _Cells(logits)
    for i, row in enumerate(rows):
        penalty = row.params.repetition_penalty
        if penalty != 1.0:
            cells.add(i, dict.fromkeys(row.token_ids, penalty))
    if cells.is_empty():
        return
    index, penalties = cells.index(), cells.values()
    before = logits[index]  # [num_cells]
    logits[index] = torch.where(before > 0, before / penalties, before * penalties)


def _penalise_use(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Take off the frequency penalty per use in the answer, and the presence penalty once."""
    cells = _Cells(logits)
    for i, row in enumerate(rows):
        frequency, presence = row.params.frequency_penalty, row.params.presence_penalty
        if frequency or presence:
            uses = Counter(row.token_ids[row.num_prompt_tokens :])
            cells.add(i, {token: -frequency * n - presence for token, n in uses.items()})
    cells.add_to_logits()


def _known(value_of: Mapping[int, float], *, vocab: int) -> Mapping[int, float]:
    """Leave out what is no token: it can't be drawn as it is."""
    return {token: value for token, value in value_of.items() if 0 <= token < vocab}
