"""The largest logit, against torch's own."""

import pytest
import torch

from engine.sampling.largest import largest


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1280, 49152])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_value_and_first_place_are_torchs(num_rows: int, vocab: int):
    generator = torch.Generator().manual_seed(vocab)
    # Few values, so that the largest is there many times.
    logits = torch.randint(-3, 4, (num_rows, vocab), generator=generator).float()
    values, places = largest(logits)
    assert torch.equal(values, logits.max(dim=-1).values)
    assert places.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("place", [0, 200, 255])
def test_nan_and_infinities_are_seen(place: int):
    logits = torch.zeros(4, 256)
    logits[0, place], logits[1, place] = torch.nan, torch.inf
    logits[2] = -torch.inf
    logits[3, place] = -torch.inf
    values, places = largest(logits)
    assert values[0].isnan()
    assert values[1:].tolist() == [torch.inf, -torch.inf, 0.0]
    assert places.tolist()[1:3] == [place, 0]
