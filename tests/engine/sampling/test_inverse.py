"""The inverse of the distribution function, against its definition."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.inverse import invert

LARGEST_NOISE = 1.0 - 2.0**-49


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=1, max_size=600).filter(any),
    noise=st.floats(2.0**-49, LARGEST_NOISE),
)
def test_the_token_is_the_first_at_which_the_sum_passes_the_noise(weights, noise):
    probs = torch.tensor([weights], dtype=torch.float32)
    token = int(invert(probs, [noise]))
    target = noise * sum(weights)
    assert weights[token] > 0
    assert sum(weights[:token]) <= target * (1 + 1e-12)
    assert target <= sum(weights[: token + 1]) * (1 + 1e-12)


def test_the_ends_of_the_noise_give_the_first_and_the_last_possible_token():
    probs = torch.zeros(2, 1000)
    probs[:, 300:700] = torch.rand(400, generator=torch.Generator().manual_seed(0)) + 0.1
    assert invert(probs, [2.0**-49, LARGEST_NOISE]).tolist() == [300, 699]


def test_a_tiny_token_behind_many_large_ones_can_be_drawn():
    """In fp32 its probability is lost in the running sum; in fp64 it isn't."""
    probs = torch.full((1, 1000), 1e-3)
    probs[0, 999] = 1e-12
    assert invert(probs, [1.0 - 1e-13]).tolist() == [999]


def test_a_row_with_a_nan_gets_a_number_and_harms_no_other():
    probs = torch.full((2, 700), float("nan"))
    probs[1] = 1.0
    assert invert(probs, [0.5, 0.5])[1] == 350
