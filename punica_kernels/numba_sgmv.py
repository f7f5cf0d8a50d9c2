"""Segmented LoRA over long segments on a CPU: an adapter's rows against tiles of tokens.

What numba_lora does for segments of few tokens, where reading the rows is what costs, this does for
long ones, where the products are (SGMV; Chen et al., "Punica", 2023).
"""

from typing import Any

import numpy as np
from numba import prange
from numba.extending import overload

from punica_kernels.arena import ModuleSpec
from punica_kernels.numba_both import in_parallel
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
_ROOM = 8  # rows more than a tile's, for the last of its groups; above ROWS and TURNED_ROWS


def takes(module: ModuleSpec) -> bool:
    """Say whether a module's widths are whole panels and vectors, as this kernel needs."""
    widths = (*module.slice_out_features, module.in_features)
    return all(width % PANEL_COLUMNS == 0 and width % TURNED_DEPTH == 0 for width in widths)


def scratch_len(*, in_features: int, max_rank: int) -> int:
    """Return the fp32 elements that a thread works in: see _add_tile."""
    rows, rank = MAX_TILE_ROWS + _ROOM, max_rank + TURNED_ROWS
    inputs = (rows + TURNED_ROWS) * in_features
    return inputs + rows * rank + (rank + ROWS) * PANEL_COLUMNS


def _add_tiles(y, x, a, b, row0s, ranks, scales, column0s, tiles, tile_starts, scratch):
    """y[t, columns of slice] += scale * (x[t] · a[slice, span]ᵀ) · b[span, columns].

    tiles        [num_tiles, 3] int64: start, num_tokens (at most MAX_TILE_ROWS), lora_index
    tile_starts  [num_threads + 1]: which tiles a thread takes
    scratch      [num_threads, scratch_len] fp32

    The others are numba_lora's. All arithmetic is fp32, y is rounded once.
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
        per = elements_of(y)
        depth, row0 = a.shape[2] * per, row0s[lora_index]
        a0 = (num_tokens + TURNED_ROWS - 1) // TURNED_ROWS * TURNED_ROWS * depth
        v0 = a0 + TURNED_ROWS * depth
        mine[num_tokens * depth : v0] = np.float32(0.0)
        for t in range(num_tokens):
            spread(x[start + t], mine[t * depth : (t + 1) * depth])
        for s in range(a.shape[0]):
            rank, scale = ranks[s, lora_index], scales[s, lora_index]
            # v is [num_tokens, v_stride], and a little more.
            v_stride = (rank + TURNED_ROWS - 1) // TURNED_ROWS * TURNED_ROWS
            b0 = v0 + (num_tokens + _ROOM) * v_stride
            sums0 = b0 + rank * PANEL_COLUMNS
            for r in range(0, rank, TURNED_ROWS):
                num_rows = min(TURNED_ROWS, rank - r)
                for more in range(num_rows):
                    wide = mine[a0 + more * depth : a0 + (more + 1) * depth]
                    spread(a[s, row0 + r + more], wide)
                for t in range(0, num_tokens, TURNED_ROWS):
                    multiply_turned(
                        mine, v0 + t * v_stride + r, v_stride, mine, t * depth, depth,
                        mine, a0, depth, depth,
                    )  # fmt: skip
            v = mine[v0 : v0 + num_tokens * v_stride]
            for i in range(v.shape[0]):
                v[i] *= scale
            step = PANEL_COLUMNS // per
            for column in range(column0s[s], column0s[s + 1] if rank > 0 else 0, step):
                for r in range(rank):
                    wide = mine[b0 + r * PANEL_COLUMNS : b0 + (r + 1) * PANEL_COLUMNS]
                    spread(b[row0 + r, column : column + step], wide)
                for t in range(0, num_tokens, ROWS):
                    multiply(
                        mine, sums0, PANEL_COLUMNS, mine, v0 + t * v_stride, v_stride,
                        mine, b0, PANEL_COLUMNS, rank, False,
                    )  # fmt: skip
                    for more in range(min(ROWS, num_tokens - t)):
                        sums = mine[sums0 + more * PANEL_COLUMNS :]
                        add_into(y[start + t + more, column : column + step], sums[:PANEL_COLUMNS])

    return add_tile


add_tiles = in_parallel(_add_tiles)
