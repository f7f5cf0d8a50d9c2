"""The two products that long chunks are made of."""

import numpy as np
import pytest
from numba import njit

from punica_kernels.numba_panels import (
    PANEL_COLUMNS,
    ROWS,
    TURNED_DEPTH,
    TURNED_ROWS,
    multiply,
    multiply_turned,
)

pytestmark = pytest.mark.slow  # compiles

GAP = 3  # elements between rows that belong to nobody


@njit
def run_multiply(c, c_stride, a, a_stride, b, b_stride, depth):
    multiply(c, 1, c_stride, a, 2, a_stride, b, 3, b_stride, depth, False)


@njit
def run_added_multiply(c, c_stride, a, a_stride, b, b_stride, depth):
    multiply(c, 1, c_stride, a, 2, a_stride, b, 3, b_stride, depth, True)


@njit
def run_multiply_turned(c, c_stride, a, a_stride, b, b_stride, depth):
    multiply_turned(c, 1, c_stride, a, 2, a_stride, b, 3, b_stride, depth)


def strided(matrix: np.ndarray, offset: int) -> tuple[np.ndarray, int, np.ndarray]:
    """Return the matrix in a flat array of NaN, its stride, and a view of its elements."""
    num_rows, num_columns = matrix.shape
    stride = num_columns + GAP
    flat = np.full(offset + num_rows * stride, np.nan, dtype=np.float32)
    view = flat[offset:].reshape(num_rows, stride)[:, :num_columns]
    view[:] = matrix
    return flat, stride, view


@pytest.mark.parametrize("depth", [1, 7, 64])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_panel_is_multiplied(depth: int, is_added: bool):
    rng = np.random.default_rng(depth)
    a, b = rng.standard_normal((ROWS, depth)), rng.standard_normal((depth, PANEL_COLUMNS))
    before = rng.standard_normal((ROWS, PANEL_COLUMNS)) if is_added else np.nan
    c, c_stride, view = strided(np.full((ROWS, PANEL_COLUMNS), before), 1)
    run = run_added_multiply if is_added else run_multiply
    run(c, c_stride, *strided(a, 2)[:2], *strided(b, 3)[:2], depth)
    expected = a @ b + (before if is_added else 0)
    np.testing.assert_allclose(view, expected, rtol=1e-5, atol=1e-5)
    assert np.isnan(c).sum() == 1 + ROWS * GAP


@pytest.mark.parametrize("depth", [TURNED_DEPTH, 3 * TURNED_DEPTH])
def test_rows_are_multiplied_with_rows(depth: int):
    rng = np.random.default_rng(depth)
    a, b = (rng.standard_normal((TURNED_ROWS, depth)) for _ in range(2))
    c, c_stride, view = strided(np.full((TURNED_ROWS, TURNED_ROWS), np.nan), 1)
    run_multiply_turned(c, c_stride, *strided(a, 2)[:2], *strided(b, 3)[:2], depth)
    np.testing.assert_allclose(view, a @ b.T, rtol=1e-5, atol=1e-5)
    assert np.isnan(c).sum() == 1 + TURNED_ROWS * GAP
