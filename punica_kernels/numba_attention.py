"""Paged attention on a CPU: rotary, the write of K and V, and softmax(q Kᵀ / √head_dim) V.

A step is cut into *units*: one row of queries against a range of its sequence's keys. Most rows
are one unit; where rows are few and contexts long, a row's keys are divided among threads and its
partial sums are put together in the order of the keys. Each thread takes consecutive units of
about equal work, so a step has one parallel region a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange
from numba.extending import overload

from punica_kernels.numba_floats import FAST_SUMS, exp, larger_of, narrow, widen
from punica_kernels.numba_vectors import add_values, score_keys

TILE_KEYS = 128  # keys whose scores are held at a time; a multiple of the block size is best

# Columns of a unit.
ROW, TABLE, FIRST_KEY, STOP_KEY, IS_FRESH, PARTIAL = range(6)
UNIT_COLUMNS = 6
WHOLE_ROW = -1  # as a unit's PARTIAL: it covers all keys of its row


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Extents that are compile-time constants of the kernels."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scratch_len(self) -> int:
        """fp32 elements that a thread works in: queries, sums, scores, maxima and totals."""
        return self.num_heads * (2 * self.head_dim + TILE_KEYS + 2)

    @property
    def partial_len(self) -> int:
        """fp32 elements of a unit that is part of a row: sums, maxima and totals."""
        return self.num_heads * (self.head_dim + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionKernels:
    """The compiled pair for one shape of heads.

    rotate(qkv, rows, positions, kv_slots, cos, sin, norm, eps, k, v)
        Norms (where norm isn't empty) and turns q and k of `rows` in place, and puts k and v into
        their slots.
    attend(qkv, units, unit_starts, block_tables, block_size, positions, kv_slots, cos, sin, norm,
           eps, k, v, scratch, partials, joins, out)
        Does that for fresh rows too, then attends.

    qkv           [num_tokens, (num_heads + 2 num_kv_heads) * head_dim]
    rows          [n] rows that rotate() takes
    positions, kv_slots  [num_tokens] int64
    cos, sin      [max_model_len, head_dim / 2] fp32
    norm          [num_heads + num_kv_heads, head_dim], or [0, 0] without q/k norm
    k, v          one layer's storage, flat, [num_slots * num_kv_heads * head_dim]
    units         [num_units, UNIT_COLUMNS] int64; unit_starts [num_threads + 1]
    block_tables  [num_tables, max_num_blocks] int32
    scratch       [num_threads, scratch_len] fp32; partials [num_partials, partial_len] fp32
    joins         [num_joined_rows, 3] int64: row, first partial, number of partials
    out           [num_tokens, num_heads * head_dim]
    """

    rotate: Callable[..., None]
    attend: Callable[..., None]


@cache
def attention_kernels(shape: HeadShape) -> AttentionKernels:
    """Return the kernels of a shape; compiled, or read from the cache on disk, at first use."""
    num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    # Only numbers are closed over, so that the cache on disk knows the kernel again.
    width = num_heads * head_dim
    sums0 = width
    totals0 = 2 * width + num_heads * (TILE_KEYS + 1)
    maxima0 = totals0 - num_heads
    softmax_scale = np.float32(head_dim**-0.5)

    @njit(parallel=True, fastmath=FAST_SUMS, cache=True)
    def rotate(qkv, rows, positions, kv_slots, cos, sin, norm, eps, k, v):
        for i in prange(rows.shape[0]):
            row = rows[i]
            _turn(
                qkv, row, positions[row], kv_slots[row], cos, sin, norm, eps, k, v,
                num_heads, num_kv_heads, head_dim,
            )  # fmt: skip

    @njit(parallel=True, fastmath=FAST_SUMS, cache=True)
    def attend(
        qkv, units, unit_starts, block_tables, block_size, positions, kv_slots, cos, sin, norm,
        eps, k, v, scratch, partials, joins, out,
    ):  # fmt: skip
        for thread in prange(unit_starts.shape[0] - 1):
            mine = scratch[thread]
            for i in range(unit_starts[thread], unit_starts[thread + 1]):
                row = units[i, ROW]
                if units[i, IS_FRESH] != 0:
                    _turn(
                        qkv, row, positions[row], kv_slots[row], cos, sin, norm, eps, k, v,
                        num_heads, num_kv_heads, head_dim,
                    )  # fmt: skip
                queries = qkv[row, :width]
                for c in range(width):
                    mine[c] = widen(queries[c]) * softmax_scale
                _sum_unit(
                    mine, block_tables[units[i, TABLE]], block_size,
                    units[i, FIRST_KEY], units[i, STOP_KEY], k, v,
                    num_heads, num_kv_heads, head_dim,
                )  # fmt: skip
                partial = units[i, PARTIAL]
                if partial >= 0:
                    for c in range(width):
                        partials[partial, c] = mine[sums0 + c]
                    for h in range(2 * num_heads):
                        partials[partial, width + h] = mine[maxima0 + h]
                else:
                    for h in range(num_heads):
                        factor = np.float32(1.0) / mine[totals0 + h]
                        c0, c1 = h * head_dim, (h + 1) * head_dim
                        sums, place = mine[sums0 + c0 : sums0 + c1], out[row, c0:c1]
                        for d in range(head_dim):
                            place[d] = narrow(sums[d] * factor, out)
        for i in range(joins.shape[0]):
            _join(partials, joins[i, 1], joins[i, 2], out, joins[i, 0], num_heads, head_dim)

    return AttentionKernels(rotate=rotate, attend=attend)


def _turn(*_arguments: Any) -> None:
    """Norm and turn q and k of one row in place, and put its k and v into their slot."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_turn, prefer_literal=True, jit_options={"fastmath": FAST_SUMS})
def _turn_in_kernel(
    qkv, row, position, slot, cos, sin, norm, eps, k, v, num_heads, num_kv_heads, head_dim
):
    num_turned = num_heads.literal_value + num_kv_heads.literal_value
    dim = head_dim.literal_value
    half = dim // 2
    kv_width = num_kv_heads.literal_value * dim
    k0 = num_heads.literal_value * dim
    v0 = k0 + kv_width

    def turn(
        qkv, row, position, slot, cos, sin, norm, eps, k, v, num_heads, num_kv_heads, head_dim
    ):
        row_cos, row_sin = cos[position], sin[position]
        for h in range(num_turned):
            head = qkv[row, h * dim : (h + 1) * dim]
            if norm.shape[0] > 0:
                weight = norm[h]
                total = np.float32(0.0)
                for d in range(dim):
                    value = widen(head[d])
                    total += value * value
                factor = np.float32(1.0) / np.sqrt(total / np.float32(dim) + eps)
                for d in range(dim):
                    normed = widen(narrow(widen(head[d]) * factor, qkv))
                    head[d] = narrow(normed * widen(weight[d]), qkv)
            firsts, seconds = head[:half], head[half:]
            for d in range(half):
                first, second = widen(firsts[d]), widen(seconds[d])
                c, s = row_cos[d], row_sin[d]
                # Each product is rounded before the sum, as the checkpoints were trained.
                turned = widen(narrow(first * c, qkv)) - widen(narrow(second * s, qkv))
                firsts[d] = narrow(turned, qkv)
                turned = widen(narrow(second * c, qkv)) + widen(narrow(first * s, qkv))
                seconds[d] = narrow(turned, qkv)
        k[slot * kv_width : (slot + 1) * kv_width] = qkv[row, k0:v0]
        v[slot * kv_width : (slot + 1) * kv_width] = qkv[row, v0:]

    return turn


def _sum_unit(*_arguments: Any) -> None:
    """Leave sums, maxima and totals of one unit in the scratch that holds its queries."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_sum_unit, prefer_literal=True, jit_options={"fastmath": FAST_SUMS})
def _sum_unit_in_kernel(
    mine, table, block_size, first_key, stop_key, k, v, num_heads, num_kv_heads, head_dim
):
    heads, kv_heads, dim = (
        num_heads.literal_value,
        num_kv_heads.literal_value,
        head_dim.literal_value,
    )
    group, kv_width = heads // kv_heads, kv_heads * dim
    sums0, scores0 = heads * dim, 2 * heads * dim
    maxima0 = scores0 + heads * TILE_KEYS
    totals0 = maxima0 + heads

    def sum_unit(
        mine, table, block_size, first_key, stop_key, k, v, num_heads, num_kv_heads, head_dim
    ):
        maxima, totals = mine[maxima0:totals0], mine[totals0 : totals0 + heads]
        mine[sums0:scores0] = np.float32(0.0)
        maxima[:] = np.float32(-np.inf)
        totals[:] = np.float32(0.0)
        for tile0 in range(first_key, stop_key, TILE_KEYS):
            tile_stop = min(tile0 + TILE_KEYS, stop_key)
            key = tile0
            first_v = (np.int64(table[tile0 // block_size]) * block_size) * kv_width
            while key < tile_stop:
                offset = key % block_size
                num_keys = min(block_size - offset, tile_stop - key)
                slot0 = (np.int64(table[key // block_size]) * block_size + offset) * kv_width
                key += num_keys
                ahead, ahead0 = v, first_v
                if key < tile_stop:
                    ahead = k
                    ahead0 = np.int64(table[key // block_size]) * block_size * kv_width
                for h in range(kv_heads):
                    score_keys(
                        mine, h * group * dim, k, slot0 + h * dim, kv_width, num_keys,
                        scores0 + h * group * TILE_KEYS + key - num_keys - tile0, TILE_KEYS,
                        ahead, ahead0 + h * dim, group, dim,
                    )  # fmt: skip
            num_scores = tile_stop - tile0
            for h in range(heads):
                s0 = scores0 + h * TILE_KEYS
                scores = mine[s0 : s0 + num_scores]
                before = maxima[h]
                largest = largest_of(scores, before)
                total = np.float32(0.0)
                for j in range(num_scores):
                    weight = exp(scores[j] - largest)
                    scores[j] = weight
                    total += weight
                shrink = exp(before - largest)
                totals[h] = totals[h] * shrink + total
                maxima[h] = largest
                if tile0 > first_key:
                    head_sums = mine[sums0 + h * dim : sums0 + (h + 1) * dim]
                    for d in range(dim):
                        head_sums[d] *= shrink
            key = tile0
            while key < tile_stop:
                offset = key % block_size
                num_keys = min(block_size - offset, tile_stop - key)
                slot0 = (np.int64(table[key // block_size]) * block_size + offset) * kv_width
                key += num_keys
                ahead, ahead0 = v, slot0
                if key < stop_key:
                    ahead = v if key < tile_stop else k
                    ahead0 = np.int64(table[key // block_size]) * block_size * kv_width
                for h in range(kv_heads):
                    add_values(
                        mine, scores0 + h * group * TILE_KEYS + key - num_keys - tile0, TILE_KEYS,
                        v, slot0 + h * dim, kv_width, num_keys,
                        sums0 + h * group * dim, ahead, ahead0 + h * dim, group, dim,
                    )  # fmt: skip

    return sum_unit


def largest_of(*_arguments: Any) -> Any:
    """Return the largest of some scores and a start."""
    raise NotImplementedError("runs in numba kernels only")


@overload(largest_of)
def _largest_in_kernel(scores, start):
    def largest_of(scores, start):
        largest = start
        for j in range(scores.shape[0]):
            largest = larger_of(largest, scores[j])
        return largest

    return largest_of


def _join(*_arguments: Any) -> None:
    """Put the partial sums of one row together, in the order of its keys."""
    raise NotImplementedError("runs in numba kernels only")


@overload(_join, prefer_literal=True, jit_options={"fastmath": FAST_SUMS})
def _join_in_kernel(partials, first, count, out, row, num_heads, head_dim):
    heads, dim = num_heads.literal_value, head_dim.literal_value
    width = heads * dim

    def join(partials, first, count, out, row, num_heads, head_dim):
        for h in range(heads):
            largest = np.float32(-np.inf)
            for p in range(first, first + count):
                largest = max(largest, partials[p, width + h])
            total = np.float32(0.0)
            for p in range(first, first + count):
                shrink = exp(partials[p, width + h] - largest)
                partials[p, width + h] = shrink
                total += partials[p, width + heads + h] * shrink
            for d in range(dim):
                value = np.float32(0.0)
                for p in range(first, first + count):
                    value += partials[p, h * dim + d] * partials[p, width + h]
                out[row, h * dim + d] = narrow(value / total, out)

    return join
