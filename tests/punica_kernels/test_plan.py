"""A plan is the runs of a step's tokens that carry an adapter, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from punica_kernels.plan import LoraPlan, Segment, build_plan


def test_a_step_of_the_base_alone_has_no_plan() -> None:
    assert build_plan([None, None], [3, 1]) is None
    assert build_plan([0], [0]) is None


def test_neighbouring_runs_of_one_adapter_are_one_segment() -> None:
    plan = build_plan([None, 1, 1, 1, 2], [2, 1, 0, 3, 1])
    assert plan is not None
    assert plan.segments == (
        Segment(start=2, num_tokens=4, lora_index=1),
        Segment(start=6, num_tokens=1, lora_index=2),
    )
    assert plan.num_tokens == 7


def test_overlapping_segments_are_an_error() -> None:
    segments = (
        Segment(start=0, num_tokens=2, lora_index=0),
        Segment(start=1, num_tokens=2, lora_index=1),
    )
    with pytest.raises(AssertionError, match="disjoint"):
        LoraPlan(segments=segments, num_tokens=4)


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(0, 4)), max_size=8))
def test_every_token_has_the_adapter_of_its_run(runs: list[tuple[int | None, int]]) -> None:
    expected = [index for index, length in runs for _ in range(length)]
    plan = build_plan([index for index, _ in runs], [length for _, length in runs])
    found: list[int | None] = [None] * len(expected)
    for segment in plan.segments if plan is not None else ():
        found[segment.start : segment.stop] = [segment.lora_index] * segment.num_tokens
    assert found == expected
