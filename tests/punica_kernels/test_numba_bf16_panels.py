"""Products of bf16 pairs, and the rounding that goes with them."""

import numpy as np
import pytest
import torch
from numba import njit

from punica_kernels.numba_bf16_panels import (
    multiply_pairs,
    multiply_rows,
    word_of,
)
from punica_kernels.numba_dots import LANES, ROWS, problem
from punica_kernels.numba_expand import add_expanded
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
def run_multiply_rows(c, a, num_a, b, num_b):
    depth = a.shape[1]
    multiply_rows(c, 0, ROWS, a, depth, depth, num_a, b, 0, depth, num_b, depth)


@njit
def run_add_expanded(y, v, num_rows, b, depth):
    width = y.shape[1]
    add_expanded(y, width, width, v, 0, depth, num_rows, b, 0, width, depth, 2)


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


@pytest.mark.parametrize(("num_a", "num_b"), [(4, 4), (9, 2), (1, 3)])
def test_rows_of_pairs_are_multiplied_and_none_beyond_the_last_is_read(num_a, num_b):
    generator = torch.Generator().manual_seed(num_a)
    a, b = (torch.randn(12, 96, generator=generator).to(torch.bfloat16) for _ in range(2))
    expected = a[1 : 1 + num_a].double() @ b[:num_b].double().T
    a[0], a[1 + num_a :], b[num_b:] = torch.nan, torch.nan, torch.nan
    c = np.full((ROWS, ROWS), np.nan, dtype=np.float32)
    run_multiply_rows(c.reshape(-1), words(a).view(PAIRS), num_a, words(b).view(PAIRS), num_b)
    height, width = min(num_a, ROWS), min(num_b, ROWS)
    got = c[:height, :width]
    np.testing.assert_allclose(got, expected[:height, :width], rtol=1e-5, atol=1e-5)
    assert np.isfinite(c).all()


@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_products_are_added_to_the_rows_there_are_and_rounded_once(num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    depth, columns = 5, 4 * LANES
    y = torch.randn(9, columns, generator=generator).to(torch.bfloat16)
    v = torch.randn(num_rows, depth, generator=generator)
    b = torch.randn(depth, columns, generator=generator).to(torch.bfloat16)
    expected, stop = y.double(), 1 + min(num_rows, ROWS)
    expected[1:stop] += v[: stop - 1].double() @ b.double()
    flat_v, pairs = v.numpy().reshape(-1), words(b).view(PAIRS)
    run_add_expanded(words(y).view(PAIRS), flat_v, num_rows, pairs, depth)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-6)
