"""Products of bf16 pairs, and the rounding that goes with them."""

import numpy as np
import pytest
import torch
from numba import njit

from punica_kernels.numba_bf16_panels import multiply_pairs, word_of
from punica_kernels.numba_dots import LANES, ROWS, problem
from punica_kernels.words import PAIRS, words

pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.skipif(problem() is not None, reason=f"{problem()}"),
]

GAP = 3  # elements between rows that belong to nobody


@njit
def run_multiply(c, c_stride, a, a_stride, b, b_stride, depth):
    multiply_pairs(c, 1, c_stride, a, 2, a_stride, b, 3, b_stride, depth, 4, False)


@njit
def run_added_multiply(c, c_stride, a, a_stride, b, b_stride, depth):
    multiply_pairs(c, 1, c_stride, a, 2, a_stride, b, 3, b_stride, depth, 2, True)


@njit
def run_word_of(values, out):
    for i in range(values.shape[0]):
        out[i] = word_of(values[i])


def strided(matrix: np.ndarray, offset: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Return the matrix in a flat array of ones, its stride, and a view of its elements."""
    num_rows, num_columns = matrix.shape
    stride = num_columns + GAP
    flat = np.ones(offset + num_rows * stride, dtype=matrix.dtype)
    view = flat[offset:].reshape(num_rows, stride)[:, :num_columns]
    view[:] = matrix
    return flat, stride, view


@pytest.mark.parametrize("depth", [1, 7, 64])
@pytest.mark.parametrize(("run", "num_vectors"), [(run_multiply, 4), (run_added_multiply, 2)])
def test_a_panel_of_pairs_is_multiplied(depth, run, num_vectors):
    generator = torch.Generator().manual_seed(depth)
    columns = num_vectors * LANES
    a = torch.randn(ROWS, 2 * depth, generator=generator).to(torch.bfloat16)
    b = torch.randn(2 * depth, columns, generator=generator).to(torch.bfloat16)
    panel = b.view(depth, 2, columns).transpose(1, 2).reshape(depth, 2 * columns)
    before = np.full((ROWS, columns), 0.5, dtype=np.float32)
    c, c_stride, view = strided(before, 1)
    a_words, b_words = (words(one.contiguous()).view(PAIRS) for one in (a, panel))
    run(c, c_stride, *strided(a_words, 2)[:2], *strided(b_words, 3)[:2], depth)
    expected = (a.double() @ b.double()).numpy() + (0.5 if run is run_added_multiply else 0)
    np.testing.assert_allclose(view, expected, rtol=1e-5, atol=1e-5)
    assert (c == 1).sum() == 1 + ROWS * GAP


def test_a_word_is_what_torch_rounds_to():
    values = torch.tensor([0.0, 1.0, -1.0, 1 + 2**-8, 1 + 3 * 2**-8, 3.14159, 3e38, torch.inf])
    values = torch.cat([values, torch.randn(90, generator=torch.Generator().manual_seed(0))])
    out = np.zeros(len(values), dtype=np.uint16)
    run_word_of(values.numpy(), out)
    np.testing.assert_array_equal(out, words(values.to(torch.bfloat16)))
