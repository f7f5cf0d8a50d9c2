"""Dot products of bf16 pairs, against exact ones."""

import numpy as np
import pytest
import torch
from numba import njit

from punica_kernels.numba_dots import LANES, dot_rows, problem
from punica_kernels.words import PAIRS, words

pytestmark = pytest.mark.skipif(problem() is not None, reason=problem() or "they run")


@njit
def _dot(x, a):
    return dot_rows(x, a)


@pytest.mark.parametrize("num_vectors", [1, 3, 4, 5, 9, 18, 48])
def test_a_dot_product_takes_every_pair_once(num_vectors):
    generator = torch.Generator().manual_seed(num_vectors)
    rows = torch.randn(3, 2 * LANES * num_vectors, generator=generator).to(torch.bfloat16)
    # Its neighbours in memory hold what would spoil it.
    rows[0], rows[2] = float("nan"), float("nan")
    other = torch.randn(rows.shape[1], generator=generator).to(torch.bfloat16)
    got = _dot(words(rows).view(PAIRS)[1], words(other[None]).view(PAIRS)[0])
    expected = float(rows[1].double() @ other.double())
    assert got == pytest.approx(expected, abs=rows.shape[1] * 2**-20)
    assert np.isnan(_dot(words(rows).view(PAIRS)[0], words(other[None]).view(PAIRS)[0]))
