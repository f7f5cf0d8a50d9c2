"""Attention over paged K and V: chunks of any length, grouped query heads, long contexts split."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica_kernels.attention_tiles import PagedPlan, QueryTiles
from punica_kernels.triton_launch import check_rows, check_table, dot, dot_options, launch_options
from punica_kernels.triton_tiles import next_power_of_2

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16


@triton.jit
def split_range(
    stop: tl.tensor, split: tl.tensor, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Return first and last + 1 KV position of a split of positions 0 … stop; may be empty."""
    length = tl.cdiv(tl.cdiv(stop, NUM_SPLITS), BLOCK_N) * BLOCK_N
    begin = split * length
    return begin, tl.minimum(begin + length, stop)


@triton.jit(do_not_specialize=["scale", "table_stride"])
def attention_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    out_stride: tl.tensor,
    kv_block_stride: tl.tensor,
    kv_offset_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    num_heads: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attend with the query heads of one KV head, of one tile of query tokens, over one split.

    With one split the result goes to out; else its sum, its peak and its weight to the parts.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows = tl.load(lines_ptr + tile * 4 + 1)
    if num_rows == 0:
        return
    num_earlier = tl.load(lines_ptr + tile * 4 + 2)
    table = tables_ptr + tl.load(lines_ptr + tile * 4 + 3).to(tl.int64) * table_stride
    # Row m is query token m // BLOCK_GROUP with query head m % BLOCK_GROUP of the group.
    m = tl.arange(0, BLOCK_M)
    token, member = m // BLOCK_GROUP, m % BLOCK_GROUP
    head = kv_head * GROUP + member
    d = tl.arange(0, BLOCK_D)
    row_mask = (token < num_rows) & (token < BLOCK_Q) & (member < GROUP)
    row = (tl.load(lines_ptr + tile * 4) + token).to(tl.int64)
    mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    q_place = q_ptr + row[:, None] * q_stride + (head * HEAD_DIM)[:, None] + d[None, :]
    q = tl.load(q_place, mask=mask, other=0.0)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    stop = num_earlier + num_rows
    begin, end = split_range(stop, split, NUM_SPLITS, BLOCK_N)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        seen = n < end
        block = tl.load(table + n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        kv_row = block * kv_block_stride + (n % BLOCK_SIZE).to(tl.int64) * kv_offset_stride
        kv_place = (kv_row + kv_head * kv_head_stride)[:, None] + d[None, :]
        kv_mask = seen[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + kv_place, mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + kv_place, mask=kv_mask, other=0.0)
        scores = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        scores = dot(q, tl.trans(k), scores, WIDEN, PRECISION) * scale
        visible = seen[None, :] & (n[None, :] <= (num_earlier + token)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no peak to subtract.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(peak - base)
        weight = weight * shrunk + tl.sum(p, axis=1)
        acc = dot(p.to(v.dtype), v, acc * shrunk[:, None], WIDEN, PRECISION)
        peak = new_peak
    if NUM_SPLITS == 1:
        acc = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
        out_place = out_ptr + row[:, None] * out_stride + (head * HEAD_DIM)[:, None] + d[None, :]
        tl.store(out_place, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        num_places = tl.num_programs(0).to(tl.int64) * BLOCK_Q
        place = (split * num_places + tile * BLOCK_Q + token) * num_heads + head
        tl.store(part_ptr + place[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
        tl.store(peak_ptr + place * 2, peak, mask=row_mask)
        tl.store(peak_ptr + place * 2 + 1, weight, mask=row_mask)


@triton.jit
def combine_kernel(
    part_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lines_ptr: tl.tensor,
    out_stride: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> None:
    """Add one head's parts of one query token, in the order of the splits."""
    place0, head = tl.program_id(0), tl.program_id(1)
    tile, token = place0 // BLOCK_Q, place0 % BLOCK_Q
    if token >= tl.load(lines_ptr + tile * 4 + 1):
        return
    d = tl.arange(0, BLOCK_D)
    mask = d < HEAD_DIM
    num_places = tl.num_programs(0).to(tl.int64)
    peak = float("-inf")
    weight = 0.0
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        place = (split * num_places + place0) * num_heads + head
        part = tl.load(part_ptr + place * HEAD_DIM + d, mask=mask, other=0.0)
        part_peak = tl.load(peak_ptr + place * 2)
        new_peak = tl.maximum(peak, part_peak)
        # An empty part has no peak; the first one never is.
        shrunk, share = tl.exp2(peak - new_peak), tl.exp2(part_peak - new_peak)
        acc = acc * shrunk + part * share
        weight = weight * shrunk + tl.load(peak_ptr + place * 2 + 1) * share
        peak = new_peak
    row = (tl.load(lines_ptr + tile * 4) + token).to(tl.int64)
    out_place = out_ptr + row * out_stride + head * HEAD_DIM + d
    tl.store(out_place, (acc / weight).to(out_ptr.dtype.element_ty), mask=mask)


def paged_attention(
    q: Tensor, out: Tensor, *, k: Tensor, v: Tensor, plan: PagedPlan, scale: float
) -> None:
    """Write softmax(scale · q Kᵀ) V of each row over its own sequence's context to `out`.

        out[t, h] = Σ_j p_j v[j, kv(h)],   p = softmax over j ≤ position(t) of scale · q[t, h]·k[j]

    q, out  [num_tokens, num_heads, head_dim]; rows may be wider than their heads
    k, v    [num_blocks, block_size, num_kv_heads, head_dim], a layer's; the step's own K and V are
            in already. Cells outside the sequences' contexts aren't read.

    Scores and sums are in fp32; p is rounded to the format of v before it meets v. The parts of a
    split context are added in their order, so a row's result depends on its own context, and on
    the number of splits, alone.
    """
    check_rows(q, out, k, v)
    assert k.stride() == v.stride(), "K and V are laid out alike"
    assert q.stride(1) == out.stride(1) == q.shape[2], "the heads of a row lie side by side"
    assert k.shape[3] == q.shape[2], "K and q have one head_dim"
    check_table(plan.block_tables, plan.block_tables.shape[1])
    for launch in plan.launches:
        check_table(launch.lines, 4)
        _attend(q, out, k=k, v=v, launch=launch, block_tables=plan.block_tables, scale=scale)


def _attend(
    q: Tensor,
    out: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    launch: QueryTiles,
    block_tables: Tensor,
    scale: float,
) -> None:
    num_heads, head_dim, num_kv_heads = q.shape[1], q.shape[2], k.shape[2]
    group = num_heads // num_kv_heads
    block_group = next_power_of_2(group)
    block_d = max(next_power_of_2(head_dim), _MIN_DOT_ROWS)
    num_tiles, num_splits = launch.lines.shape[0], launch.num_splits
    parts, peaks = out, out
    if num_splits > 1:
        shape = (num_splits, num_tiles * launch.block_q, num_heads)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        peaks = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    options = launch_options(num_warps=launch.tiles.num_warps, num_stages=launch.tiles.num_stages)
    attention_kernel[num_tiles, num_kv_heads, num_splits](
        q,
        k,
        v,
        out,
        parts,
        peaks,
        launch.lines,
        block_tables,
        scale * _LOG2_E,
        q.stride(0),
        out.stride(0),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        block_tables.stride(0),
        num_heads,
        BLOCK_SIZE=k.shape[1],
        HEAD_DIM=head_dim,
        GROUP=group,
        BLOCK_GROUP=block_group,
        BLOCK_Q=launch.block_q,
        BLOCK_M=max(next_power_of_2(launch.block_q * block_group), _MIN_DOT_ROWS),
        BLOCK_N=launch.tiles.block_n,
        BLOCK_D=block_d,
        NUM_SPLITS=num_splits,
        **dot_options(q.dtype),
        **options,
    )
    if num_splits > 1:
        combine_kernel[num_tiles * launch.block_q, num_heads](
            parts,
            peaks,
            out,
            launch.lines,
            out.stride(0),
            num_heads,
            HEAD_DIM=head_dim,
            BLOCK_Q=launch.block_q,
            BLOCK_D=block_d,
            NUM_SPLITS=num_splits,
            **launch_options(num_warps=1),
        )
