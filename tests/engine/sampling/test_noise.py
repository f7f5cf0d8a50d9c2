"""The noise looks drawn, and is not."""

import itertools
import math

import pytest

from engine.sampling.noise import uniform


@pytest.mark.parametrize(
    ("draws"),
    [
        [uniform(0, position) for position in range(20_000)],
        [uniform(seed, 7) for seed in range(20_000)],
        [uniform(2**63 - 1 - seed, seed) for seed in range(20_000)],
        [uniform(0, 7, sample_index=n) for n in range(20_000)],
        [uniform(5, n // 4, sample_index=n % 4) for n in range(20_000)],
    ],
    ids=["along a sequence", "over seeds", "over both", "over samples", "of four samples"],
)
def test_draws_are_uniform(draws):
    buckets = [0] * 20
    for value in draws:
        buckets[int(value * 20)] += 1
    chi_square = sum((count - 1000) ** 2 / 1000 for count in buckets)
    assert chi_square < 43.8  # 19 degrees of freedom; one in a thousand is above
    pairs = list(itertools.pairwise(draws))
    covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
    assert abs(covariance) * 12 < 4 / math.sqrt(len(pairs))


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 5, -(2**70)])
def test_any_whole_number_is_a_seed(seed):
    value = uniform(seed, 10**6)
    assert 0.0 < value < 1.0
    assert value == uniform(seed, 10**6)


def test_seeds_and_positions_are_not_interchangeable():
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500


def test_samples_of_one_seed_are_not_another_seed_or_place():
    values = {
        uniform(seed, place, sample_index=sample)
        for seed in range(16)
        for place in range(16)
        for sample in range(16)
    }
    assert len(values) == 16**3
