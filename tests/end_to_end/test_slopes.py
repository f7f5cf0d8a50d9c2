"""The slope that the cycles are judged by: a leak is one, an allocator's single step is none."""

import pytest

from tests.end_to_end.processes import slope_of

NUM_SAMPLES, START, MIB = 8000, 600 * 1024**2, 1024**2
LEAK = 1500  # bytes a sample


@pytest.mark.parametrize("step", [1, 4096, 2 * MIB])
def test_a_leak_is_a_slope_whatever_steps_it_comes_in(step: int):
    samples = [START + LEAK * number // step * step for number in range(NUM_SAMPLES)]
    assert slope_of(samples) == pytest.approx(LEAK, rel=0.1)


@pytest.mark.parametrize("when", [0.1, 0.25, 0.8])
def test_a_step_that_happens_once_is_none(when: float):
    samples = [START + 8 * MIB * (number > when * NUM_SAMPLES) for number in range(NUM_SAMPLES)]
    assert slope_of(samples) == 0
