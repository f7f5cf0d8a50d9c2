"""Attention of long chunks on a CPU: tiles of rows against blocks of keys, as two products each.

A *tile* is some rows of one chunk with the query heads of one KV head. Its keys are taken in blocks
that are widened once for all of its rows; scores never leave the thread's scratch, and sums are put
right as maxima grow (Dao et al., "FlashAttention", 2022). All arithmetic is fp32; as in torch's own
attention, a weight is rounded to the format of V before it meets V, and its total is not.

K and V must be finite: the rows of a tile share products, in which a later key's weight is zero.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange
from numba.extending import overload

from punica_kernels.numba_attention import HeadShape, largest_of
from punica_kernels.numba_floats import FAST_SUMS, exp, narrow, widen
from punica_kernels.numba_panels import PANEL_COLUMNS, ROWS, multiply

MAX_TILE_ROWS = 64  # of a chunk, in a tile
KEYS_AT_ONCE = 512
assert KEYS_AT_ONCE % PANEL_COLUMNS == 0, "a block of keys is whole panels"

# Columns of a tile.
ROW0, NUM_ROWS, TABLE, NUM_EARLIER, KV_HEAD = range(5)
TILE_COLUMNS = 5


def takes(shape: HeadShape) -> bool:
    """Say whether heads are whole panels, as these kernels need."""
    return shape.head_dim % PANEL_COLUMNS == 0


def scratch_len(shape: HeadShape) -> int:
    """Return the fp32 elements that a thread works in: see _attend_tile."""
    num_queries = _padded(MAX_TILE_ROWS * (shape.num_heads // shape.num_kv_heads))
    queries_and_sums = 2 * num_queries * (shape.head_dim + 1)
    return queries_and_sums + KEYS_AT_ONCE * (ROWS + 2 * shape.head_dim)


def _padded(num_queries: int) -> int:
    return -(-num_queries // ROWS) * ROWS


@cache
def prefill_kernel(shape: HeadShape) -> Callable[..., None]:
    """Return the kernel of a shape; compiled, or read from the cache on disk, at first use.

    attend(qkv, tiles, tile_starts, block_tables, block_size, k, v, scratch, out)

    qkv           [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], q turned already
    tiles         [num_tiles, TILE_COLUMNS] int64; row i of a tile sees NUM_EARLIER + i + 1 keys
    tile_starts   [num_threads + 1]: which tiles a thread takes
    block_tables  [num_tables, max_num_blocks] int32
    k, v          one layer's storage, flat, with the keys of these rows in it
    scratch       [num_threads, scratch_len] fp32
    out           [num_tokens, num_heads * head_dim]
    """
    assert takes(shape), "heads are whole panels"
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim

    @njit(parallel=True, fastmath=FAST_SUMS, cache=True)
    def attend(qkv, tiles, tile_starts, block_tables, block_size, k, v, scratch, out):
        for thread in prange(tile_starts.shape[0] - 1):
            for i in range(tile_starts[thread], tile_starts[thread + 1]):
                _attend_tile(
                    qkv, tiles[i, ROW0], tiles[i, NUM_ROWS], block_tables[tiles[i, TABLE]],
                    tiles[i, NUM_EARLIER], tiles[i, KV_HEAD], block_size, k, v, scratch[thread],
                    out, num_heads, num_kv_heads, head_dim,
                )  # fmt: skip

    kernel: Callable[..., None] = attend
    return kernel


def _attend_tile(*_arguments: Any) -> None:
    raise NotImplementedError("runs in numba kernels only")


@overload(_attend_tile, prefer_literal=True, jit_options={"fastmath": FAST_SUMS})
def _attend_tile_in_kernel(
    qkv, row0, num_rows, table, num_earlier, kv_head, block_size, k, v, mine, out,
    num_heads, num_kv_heads, head_dim,
):  # fmt: skip
    heads, kv_heads, dim = (
        num_heads.literal_value,
        num_kv_heads.literal_value,
        head_dim.literal_value,
    )
    group, kv_width = heads // kv_heads, kv_heads * dim
    scale = np.float32(dim**-0.5)

    def attend_tile(
        qkv, row0, num_rows, table, num_earlier, kv_head, block_size, k, v, mine, out,
        num_heads, num_kv_heads, head_dim,
    ):  # fmt: skip
        # Query m is head m % group of row m // group. Padding queries are zeros, and see what the
        # last one does.
        num_queries = num_rows * group
        padded = (num_queries + ROWS - 1) // ROWS * ROWS
        sums0 = padded * dim
        maxima0 = 2 * sums0
        totals0 = maxima0 + padded
        scores0 = totals0 + padded
        keys0 = scores0 + ROWS * KEYS_AT_ONCE
        values0 = keys0 + KEYS_AT_ONCE * dim
        maxima, totals = mine[maxima0:totals0], mine[totals0:scores0]
        keys, values = mine[keys0:values0], mine[values0 : values0 + KEYS_AT_ONCE * dim]
        mine[:maxima0] = np.float32(0.0)
        maxima[:] = np.float32(-np.inf)
        totals[:] = np.float32(0.0)
        for m in range(num_queries):
            c0 = (kv_head * group + m % group) * dim
            narrow_q, q = qkv[row0 + m // group, c0 : c0 + dim], mine[m * dim : (m + 1) * dim]
            for d in range(dim):
                q[d] = widen(narrow_q[d]) * scale
        for key0 in range(0, num_earlier + num_rows, KEYS_AT_ONCE):
            num_keys = min(KEYS_AT_ONCE, num_earlier + num_rows - key0)
            _widen_block(keys, values, table, key0, num_keys, block_size, kv_head, k, v, kv_width)
            for m0 in range(0, padded, ROWS):
                last_m = min(m0 + ROWS, num_queries) - 1
                num_seen = min(num_keys, num_earlier + last_m // group + 1 - key0)
                if num_seen <= 0:
                    continue
                for j in range(0, num_seen, PANEL_COLUMNS):
                    multiply(
                        mine, scores0 + j, KEYS_AT_ONCE, mine, m0 * dim, dim,
                        mine, keys0 + j * dim, PANEL_COLUMNS, dim, False,
                    )  # fmt: skip
                for r in range(ROWS):
                    m = m0 + r
                    row = min(m, num_queries - 1) // group
                    seen = max(0, min(num_keys, num_earlier + row + 1 - key0))
                    scores = mine[scores0 + r * KEYS_AT_ONCE : scores0 + (r + 1) * KEYS_AT_ONCE]
                    largest = largest_of(scores[:seen], maxima[m])
                    shrink = exp(maxima[m] - largest)
                    totals[m] = totals[m] * shrink + _weigh(scores, seen, num_seen, largest, v)
                    maxima[m] = largest
                    sums = mine[sums0 + m * dim : sums0 + (m + 1) * dim]
                    for d in range(dim):
                        sums[d] *= shrink
                for d in range(0, dim, PANEL_COLUMNS):
                    multiply(
                        mine, sums0 + m0 * dim + d, dim, mine, scores0, KEYS_AT_ONCE,
                        mine, values0 + d, dim, num_seen, True,
                    )  # fmt: skip
        for m in range(num_queries):
            c0 = (kv_head * group + m % group) * dim
            place = out[row0 + m // group, c0 : c0 + dim]
            sums, factor = mine[sums0 + m * dim : sums0 + (m + 1) * dim], 1 / totals[m]
            for d in range(dim):
                place[d] = narrow(sums[d] * np.float32(factor), out)

    return attend_tile


def _widen_block(*_arguments: Any) -> None:
    """Put a block's keys into panels, a dimension in each row, and its values into rows."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_widen_block, inline="always")
def _widen_block_in_kernel(
    keys, values, table, key0, num_keys, block_size, kv_head, k, v, kv_width
):
    def widen_block(keys, values, table, key0, num_keys, block_size, kv_head, k, v, kv_width):
        dim = values.shape[0] // KEYS_AT_ONCE
        for j in range(num_keys):
            key = key0 + j
            slot = np.int64(table[key // block_size]) * block_size + key % block_size
            c0 = slot * kv_width + kv_head * dim
            key_row, value_row = k[c0 : c0 + dim], v[c0 : c0 + dim]
            turned = keys[j // PANEL_COLUMNS * PANEL_COLUMNS * dim + j % PANEL_COLUMNS :]
            value = values[j * dim : (j + 1) * dim]
            for d in range(dim):
                turned[d * PANEL_COLUMNS] = widen(key_row[d])
                value[d] = widen(value_row[d])

    return widen_block


def _weigh(*_arguments: Any) -> Any:
    """Turn one row's scores into weights, zero from `seen` on; return the sum of the weights."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_weigh, inline="always")
def _weigh_in_kernel(scores, seen, num_seen, largest, v):
    def weigh(scores, seen, num_seen, largest, v):
        total = np.float32(0.0)
        for j in range(seen):
            weight = exp(scores[j] - largest)
            scores[j] = widen(narrow(weight, v))
            total += weight
        scores[seen:num_seen] = np.float32(0.0)
        return total

    return weigh
