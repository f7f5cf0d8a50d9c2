"""Which adapter each run of a step's tokens carries; built once per step, shared by all layers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A contiguous run of a step's tokens with one adapter.

    lora_index is the adapter's row in the arena's tables.
    """

    start: int
    num_tokens: int
    lora_index: int

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan:
    """The segments of one step, in token order and disjoint; tokens between them are the base's.

    A step without adapters has no plan at all: base traffic pays nothing.
    """

    segments: tuple[Segment, ...]
    num_tokens: int

    def __post_init__(self) -> None:
        end = 0
        for segment in self.segments:
            assert segment.num_tokens > 0, "no segment is empty"
            assert segment.start >= end, "segments are in token order and disjoint"
            end = segment.stop
        assert end <= self.num_tokens, "segments lie inside the step"


def split_by_length(
    plan: LoraPlan, *, max_tokens: int
) -> tuple[tuple[Segment, ...], LoraPlan | None]:
    """Return the segments of at most `max_tokens`, and the plan of the others if there are any."""
    short = tuple(one for one in plan.segments if one.num_tokens <= max_tokens)
    if len(short) == len(plan.segments):
        return short, None
    long = tuple(one for one in plan.segments if one.num_tokens > max_tokens)
    return short, LoraPlan(segments=long, num_tokens=plan.num_tokens)


def select_rows(plan: LoraPlan, rows: Sequence[int]) -> LoraPlan | None:
    """Return the plan of a tensor made of some of the step's rows, in any order, with repeats.

    None if no row among them carries an adapter.
    """
    owners: list[int | None] = [None] * plan.num_tokens
    for segment in plan.segments:
        owners[segment.start : segment.stop] = [segment.lora_index] * segment.num_tokens
    return build_plan([owners[row] for row in rows], [1] * len(rows))


def build_plan(lora_indices: Sequence[int | None], lengths: Sequence[int]) -> LoraPlan | None:
    """Return the plan of consecutive runs, or None if no run carries an adapter.

    `lora_indices[i]` is the adapter of run i (None: the base), `lengths[i]` its tokens (may be 0).
    Neighbouring runs of one adapter become one segment.
    """
    segments: list[Segment] = []
    start = 0
    for lora_index, length in zip(lora_indices, lengths, strict=True):
        if lora_index is not None and length > 0:
            last = segments[-1] if segments else None
            if last is not None and last.lora_index == lora_index and last.stop == start:
                segments[-1] = Segment(
                    start=last.start, num_tokens=last.num_tokens + length, lora_index=lora_index
                )
            else:
                segments.append(Segment(start=start, num_tokens=length, lora_index=lora_index))
        start += length
    if not segments:
        return None
    return LoraPlan(segments=tuple(segments), num_tokens=start)
