"""Attention of long chunks on a CPU: tiles of rows against blocks of keys, as two products each.

A *tile* is some rows of one chunk with the query heads of one KV head. Its keys are taken in blocks
that are laid out once for all of its rows; scores never leave the thread's scratch, and sums, which
are fp32, are put right as maxima grow (Dao et al., "FlashAttention", 2022). As in torch's own
attention, a weight is rounded to the format of V before it meets V, and its total is not.

K and V come as elements or as pairs of bf16; numba_key_blocks says what a block makes of either.

K and V must be finite: the rows of a tile share products, in which a later key's weight is zero.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange
from numba.extending import overload

from punica_kernels.numba_attention import HeadShape, largest_of
from punica_kernels.numba_floats import FAST_SUMS, exp, larger_of
from punica_kernels.numba_key_blocks import (
    KEYS_AT_ONCE,
    SCORES_LEN,
    add_values,
    are_pairs,
    columns_at_once,
    rows_at_once,
    score,
    take_key,
    take_query,
    weigh,
)
from punica_kernels.numba_pairs import put
from punica_kernels.numba_panels import PANEL_COLUMNS, ROWS

MAX_TILE_ROWS = 64  # of a chunk, in a tile

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
    return queries_and_sums + SCORES_LEN + KEYS_AT_ONCE * 2 * shape.head_dim


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

    qkv, k, v and out are seen in one dtype. Pairs, where numba_dots runs, are twice as fast as the
    words of the same bf16; denormals count as zero there.
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
    group, scale = heads // kv_heads, np.float32(dim**-0.5)
    length = dim // 2 if are_pairs(k) else dim  # of a head, in what K is seen in
    kv_width = kv_heads * length
    rows, columns = rows_at_once(k), columns_at_once(k)

    def attend_tile(
        qkv, row0, num_rows, table, num_earlier, kv_head, block_size, k, v, mine, out,
        num_heads, num_kv_heads, head_dim,
    ):  # fmt: skip
        # Query m is head m % group of row m // group. Padding queries are zeros, and see what the
        # last one does.
        num_queries = num_rows * group
        padded = (num_queries + rows - 1) // rows * rows
        sums0 = padded * dim
        maxima0 = 2 * sums0
        totals0 = maxima0 + padded
        scores0 = totals0 + padded
        words0 = scores0 + rows * KEYS_AT_ONCE
        keys0 = scores0 + SCORES_LEN
        values0 = keys0 + KEYS_AT_ONCE * dim
        maxima, totals = mine[maxima0:totals0], mine[totals0:scores0]
        keys, values = mine[keys0:values0], mine[values0 : values0 + KEYS_AT_ONCE * dim]
        all_words = mine[words0:keys0].view(np.uint16)
        mine[:maxima0] = np.float32(0.0)
        maxima[:] = np.float32(-np.inf)
        totals[:] = np.float32(0.0)
        for m in range(num_queries):
            c0 = (kv_head * group + m % group) * length
            query = qkv[row0 + m // group, c0 : c0 + length]
            take_query(mine[m * length : (m + 1) * length], query)
        for key0 in range(0, num_earlier + num_rows, KEYS_AT_ONCE):
            num_keys = min(KEYS_AT_ONCE, num_earlier + num_rows - key0)
            for j in range(num_keys):
                key = key0 + j
                slot = np.int64(table[key // block_size]) * block_size + key % block_size
                c0 = slot * kv_width + kv_head * length
                take_key(keys, values, j, k[c0 : c0 + length], v[c0 : c0 + length])
            for m0 in range(0, padded, rows):
                last_m = min(m0 + rows, num_queries) - 1
                num_seen = min(num_keys, num_earlier + last_m // group + 1 - key0)
                if num_seen <= 0:
                    continue
                score(mine, scores0, m0 * length, keys0, length, num_seen, k)
                num_scores = (num_seen + columns - 1) // columns * columns
                for r in range(rows):
                    m = m0 + r
                    row = min(m, num_queries - 1) // group
                    seen = max(0, min(num_keys, num_earlier + row + 1 - key0))
                    s0 = r * KEYS_AT_ONCE
                    scores = mine[scores0 + s0 : scores0 + s0 + num_scores]
                    words = all_words[s0 : s0 + num_scores]
                    largest = larger_of(largest_of(scores[:seen], -np.inf) * scale, maxima[m])
                    shrink = exp(maxima[m] - largest)
                    total = weigh(scores, words, seen, scale, largest, v)
                    totals[m] = totals[m] * shrink + total
                    maxima[m] = largest
                    sums = mine[sums0 + m * dim : sums0 + (m + 1) * dim]
                    for d in range(dim):
                        sums[d] *= shrink
                add_values(mine, sums0 + m0 * dim, scores0, words0, values0, dim, num_seen, v)
        for m in range(num_queries):
            c0 = (kv_head * group + m % group) * length
            sums, factor = mine[sums0 + m * dim : sums0 + (m + 1) * dim], 1 / totals[m]
            for d in range(dim):
                sums[d] *= np.float32(factor)
            put(out[row0 + m // group, c0 : c0 + length], sums)

    return attend_tile
