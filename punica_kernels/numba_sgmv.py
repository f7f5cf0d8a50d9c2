"""Segmented LoRA over long segments on a CPU: an adapter's rows against tiles of tokens.

What numba_lora does for segments of few tokens, where reading the rows is what costs, this does for
long ones, where the products are (SGMV; Chen et al., "Punica", 2023). Pairs of bf16 are shrunk as
they lie where numba_dots runs; v is fp32, so that what it meets is widened everywhere.
"""

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from punica_kernels.arena import ModuleSpec
from punica_kernels.numba_bf16_panels import multiply_rows
from punica_kernels.numba_both import in_parallel
from punica_kernels.numba_dots import LANES, problem
from punica_kernels.numba_dots import ROWS as DOT_ROWS
from punica_kernels.numba_expand import add_expanded
from punica_kernels.numba_floats import FAST_SUMS
from punica_kernels.numba_pairs import add_into, elements_of, spread
from punica_kernels.numba_panels import (
    PANEL_COLUMNS,
    ROWS,
    TURNED_DEPTH,
    TURNED_ROWS,
    multiply,
    multiply_turned,
)

MAX_TILE_ROWS = 96
_PANELS_AT_ONCE = 4  # of columns, so that a row of y is met in longer pieces
_ROOM = 8  # rows more than a tile's, for the last of its groups; above ROWS and TURNED_ROWS
assert TURNED_ROWS == DOT_ROWS, "either way v has the same stride"


def takes(module: ModuleSpec) -> bool:
    """Say whether a module's widths are whole panels and vectors, as this kernel needs."""
    widths = (*module.slice_out_features, module.in_features)
    return all(width % PANEL_COLUMNS == 0 and width % TURNED_DEPTH == 0 for width in widths)


def scratch_len(*, in_features: int, max_rank: int) -> int:
    """Return the fp32 elements that a thread works in: see _add_tile."""
    rows, rank = MAX_TILE_ROWS + _ROOM, max_rank + TURNED_ROWS
    inputs = (rows + TURNED_ROWS) * in_features
    return inputs + rows * rank + (_PANELS_AT_ONCE * rank + ROWS) * PANEL_COLUMNS


def _add_tiles(y, x, a, b, row0s, ranks, scales, column0s, tiles, tile_starts, scratch):
    """y[t, columns of slice] += scale * (x[t] · a[slice, span]ᵀ) · b[span, columns].

    tiles        [num_tiles, 3] int64: start, num_tokens (at most MAX_TILE_ROWS), lora_index
    tile_starts  [num_threads + 1]: which tiles a thread takes
    scratch      [num_threads, scratch_len] fp32

    The others are numba_lora's. Sums are fp32, y is rounded once.
    """
    for thread in prange(tile_starts.shape[0] - 1):
        for i in range(tile_starts[thread], tile_starts[thread + 1]):
            _add_tile(
                y, x, a, b, row0s, ranks, scales, column0s, scratch[thread],
                tiles[i, 0], tiles[i, 1], tiles[i, 2],
            )  # fmt: skip


def _add_tile(*_arguments: Any) -> None:
    raise NotImplementedError("runs in numba kernels only")


@overload(_add_tile, jit_options={"fastmath": FAST_SUMS})
def _add_tile_in_kernel(
    y, x, a, b, row0s, ranks, scales, column0s, mine, start, num_tokens, lora_index
):
    def add_tile(y, x, a, b, row0s, ranks, scales, column0s, mine, start, num_tokens, lora_index):
        row0 = row0s[lora_index]
        v0 = _take_inputs(x, start, num_tokens, mine)
        for s in range(a.shape[0]):
            rank, scale = ranks[s, lora_index], scales[s, lora_index]
            # v is [num_tokens, v_stride], and a little more.
            v_stride = (rank + TURNED_ROWS - 1) // TURNED_ROWS * TURNED_ROWS
            b0 = v0 + (num_tokens + _ROOM) * v_stride
            _shrink(x, start, num_tokens, a, s, row0, rank, mine, v0, v_stride)
            v = mine[v0 : v0 + num_tokens * v_stride]
            for i in range(v.shape[0]):
                v[i] *= scale
            if rank > 0:
                _expand(
                    y, start, num_tokens, column0s[s], column0s[s + 1], b, row0, rank,
                    mine, v0, v_stride, b0,
                )  # fmt: skip

    return add_tile


def _take_inputs(*_arguments: Any) -> int:
    """Widen a tile's inputs, if _shrink needs that; return where the scratch is free."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_take_inputs, inline="always")
def _take_inputs_in_kernel(x, start, num_tokens, mine):
    def widened(x, start, num_tokens, mine):
        depth = x.shape[1] * elements_of(x)
        a0 = (num_tokens + TURNED_ROWS - 1) // TURNED_ROWS * TURNED_ROWS * depth
        mine[num_tokens * depth : a0 + TURNED_ROWS * depth] = np.float32(0.0)
        for t in range(num_tokens):
            spread(x[start + t], mine[t * depth : (t + 1) * depth])
        return a0 + TURNED_ROWS * depth

    return (lambda x, start, num_tokens, mine: 0) if _has_dots(x) else widened


def _shrink(*_arguments: Any) -> None:
    """v[t, r] = x[start + t] · a[s, row0 + r], and a little more in every direction."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_shrink, inline="always")
def _shrink_in_kernel(x, start, num_tokens, a, s, row0, rank, mine, v0, v_stride):
    def by_dots(x, start, num_tokens, a, s, row0, rank, mine, v0, v_stride):
        depth = x.shape[1]
        a0 = (s * a.shape[1] + row0) * depth
        for t in range(0, num_tokens, DOT_ROWS):
            for r in range(0, rank, DOT_ROWS):
                multiply_rows(
                    mine, v0 + t * v_stride + r, v_stride,
                    x, (start + t) * depth, depth, num_tokens - t,
                    a, a0 + r * depth, depth, rank - r, depth,
                )  # fmt: skip

    def in_fp32(x, start, num_tokens, a, s, row0, rank, mine, v0, v_stride):
        depth = x.shape[1] * elements_of(x)
        a0 = v0 - TURNED_ROWS * depth
        for r in range(0, rank, TURNED_ROWS):
            for more in range(min(TURNED_ROWS, rank - r)):
                wide = mine[a0 + more * depth : a0 + (more + 1) * depth]
                spread(a[s, row0 + r + more], wide)
            for t in range(0, num_tokens, TURNED_ROWS):
                multiply_turned(
                    mine, v0 + t * v_stride + r, v_stride, mine, t * depth, depth,
                    mine, a0, depth, depth,
                )  # fmt: skip

    return by_dots if _has_dots(x) else in_fp32


def _expand(*_arguments: Any) -> None:
    """y[start + t, columns of a slice] += v[t] · b[row0 : row0 + rank], rounded once."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_expand, inline="always")
def _expand_in_kernel(
    y, start, num_tokens, column, stop, b, row0, rank, mine, v0, v_stride, free0
):  # fmt: skip
    def by_pairs(y, start, num_tokens, column, stop, b, row0, rank, mine, v0, v_stride, free0):
        # Columns within rows, so that y is met along its rows; b stays in the second-level cache.
        width = y.shape[1]
        whole = column + (stop - column) // (2 * LANES) * (2 * LANES)
        for t in range(0, num_tokens, DOT_ROWS):
            y0, b0, left = (start + t) * width, row0 * width, num_tokens - t
            for c in range(column, whole, 2 * LANES):
                add_expanded(
                    y, y0 + c, width, mine, v0 + t * v_stride, v_stride, left,
                    b, b0 + c, width, rank, 2,
                )  # fmt: skip
            if whole < stop:
                add_expanded(
                    y, y0 + whole, width, mine, v0 + t * v_stride, v_stride, left,
                    b, b0 + whole, width, rank, 1,
                )  # fmt: skip

    def in_fp32(y, start, num_tokens, column, stop, b, row0, rank, mine, v0, v_stride, free0):
        step = PANEL_COLUMNS // elements_of(y)
        for first in range(column, stop, step * _PANELS_AT_ONCE):
            num_panels = min(_PANELS_AT_ONCE, (stop - first) // step)
            for p in range(num_panels):
                for r in range(rank):
                    wide0, c0 = free0 + (p * rank + r) * PANEL_COLUMNS, first + p * step
                    spread(b[row0 + r, c0 : c0 + step], mine[wide0 : wide0 + PANEL_COLUMNS])
            sums0 = free0 + num_panels * rank * PANEL_COLUMNS
            for t in range(0, num_tokens, ROWS):
                for p in range(num_panels):
                    multiply(
                        mine, sums0, PANEL_COLUMNS, mine, v0 + t * v_stride, v_stride,
                        mine, free0 + p * rank * PANEL_COLUMNS, PANEL_COLUMNS, rank, False,
                    )  # fmt: skip
                    c0 = first + p * step
                    for more in range(min(ROWS, num_tokens - t)):
                        sums = mine[sums0 + more * PANEL_COLUMNS :]
                        add_into(y[start + t + more, c0 : c0 + step], sums[:PANEL_COLUMNS])

    return by_pairs if _has_dots(y) and b.layout == "C" else in_fp32


def _has_dots(x: types.Array) -> bool:
    """Say whether rows of this type are multiplied as they lie."""
    return bool(x.dtype == types.uint32 and x.layout == "C" and problem() is None)


add_tiles = in_parallel(_add_tiles)
