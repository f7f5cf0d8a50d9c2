"""BGMV: shrink and expand of segments of one row, without a dot.

A row meets each weight once, so there is nothing to reuse and the memory sets the pace.
"""

import triton
import triton.language as tl
from torch import Tensor

from punica_kernels.device_plan import DevicePlan, ModuleTables
from punica_kernels.triton_launch import check_rows, check_table, launch_options
from punica_kernels.triton_shrink import split_features
from punica_kernels.triton_tiles import RowTiles


@triton.jit(do_not_specialize=["column0", "num_rank_tiles"])
def row_shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    v_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    row0_ptr: tl.tensor,
    column0: tl.tensor,
    num_rank_tiles: tl.tensor,
    table_stride: tl.tensor,
    x_stride: tl.tensor,
    a_slice_stride: tl.tensor,
    a_stride: tl.tensor,
    v_split_stride: tl.tensor,
    v_slice_stride: tl.tensor,
    v_stride: tl.tensor,
    in_features: tl.tensor,
    split_features: tl.tensor,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute v[split, slice, row, BLOCK_R ranks] over one split of K."""
    split = tl.program_id(2)
    slice_index = tl.program_id(1) // num_rank_tiles
    rank0 = (tl.program_id(1) % num_rank_tiles) * BLOCK_R
    row = tl.load(rows_ptr + tl.program_id(0) * 2).to(tl.int64)
    lora_index = tl.load(rows_ptr + tl.program_id(0) * 2 + 1)
    if lora_index < 0:
        return
    entry = lora_index * table_stride + column0 + slice_index
    rank = tl.load(ranks_ptr + entry)
    if rank0 >= rank:
        return
    r = rank0 + tl.arange(0, BLOCK_R)
    arena_row = (tl.load(row0_ptr + entry) + r).to(tl.int64)
    a_rows = a_ptr + slice_index.to(tl.int64) * a_slice_stride + arena_row[:, None] * a_stride
    k_stop = tl.minimum((split + 1) * split_features, in_features)
    acc = tl.zeros((BLOCK_R, BLOCK_K), dtype=tl.float32)
    for k0 in range(split * split_features, k_stop, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < k_stop, other=0.0).to(tl.float32)
        a_mask = (r < rank)[:, None] & (k < k_stop)[None, :]
        a = tl.load(a_rows + k[None, :], mask=a_mask, other=0.0).to(tl.float32)
        acc += a * x[None, :]
    v_row = v_ptr + split.to(tl.int64) * v_split_stride + slice_index.to(tl.int64) * v_slice_stride
    tl.store(v_row + row * v_stride + r, tl.sum(acc, axis=1))  # zeros behind the rank


@triton.jit(do_not_specialize=["column0"])
def row_expand_kernel(
    v_ptr: tl.tensor,
    b_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    row0_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    column0: tl.tensor,
    table_stride: tl.tensor,
    v_split_stride: tl.tensor,
    v_slice_stride: tl.tensor,
    v_stride: tl.tensor,
    b_stride: tl.tensor,
    y_stride: tl.tensor,
    COLUMN_ALIGNMENT: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add scale · v b to y[row, BLOCK_N columns of one slice]."""
    column_tile = tl.program_id(1)
    row = tl.load(rows_ptr + tl.program_id(0) * 2).to(tl.int64)
    lora_index = tl.load(rows_ptr + tl.program_id(0) * 2 + 1)
    if lora_index < 0:
        return
    slice_index = tl.load(columns_ptr + column_tile * 3)
    first_column = tl.multiple_of(tl.load(columns_ptr + column_tile * 3 + 1), COLUMN_ALIGNMENT)
    num_columns = tl.multiple_of(tl.load(columns_ptr + column_tile * 3 + 2), COLUMN_ALIGNMENT)
    entry = lora_index * table_stride + column0 + slice_index
    rank = tl.load(ranks_ptr + entry)
    if rank == 0:
        return
    n = tl.arange(0, BLOCK_N)
    column = first_column + n
    column_mask = n < num_columns
    row0 = tl.load(row0_ptr + entry)
    v_row = v_ptr + slice_index.to(tl.int64) * v_slice_stride + row * v_stride
    acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for rank0 in range(0, rank, BLOCK_R):
        r = rank0 + tl.arange(0, BLOCK_R)
        v = tl.load(v_row + r)
        v_part = v_row + r
        for _ in tl.static_range(1, NUM_SPLITS):
            v_part += v_split_stride
            v += tl.load(v_part)
        b_rows = b_ptr + (row0 + r).to(tl.int64)[:, None] * b_stride
        b_mask = (r < rank)[:, None] & column_mask[None, :]
        b = tl.load(b_rows + column[None, :], mask=b_mask, other=0.0).to(tl.float32)
        acc += v[:, None] * b
    y_place = y_ptr + row * y_stride + column
    y = tl.load(y_place, mask=column_mask, other=0.0).to(tl.float32)
    y += tl.load(scales_ptr + entry) * tl.sum(acc, axis=0)
    tl.store(y_place, y.to(y_ptr.dtype.element_ty), mask=column_mask)


def row_shrink(
    x: Tensor, v: Tensor, *, a: Tensor, tables: ModuleTables, plan: DevicePlan, tiles: RowTiles
) -> None:
    """Do what shrink does, for the plan's single rows; shapes as there."""
    num_splits, num_slices, _, rank_width = v.shape
    check_rows(x, a, v)
    check_table(plan.rows, 2)
    assert a.dtype is x.dtype, "the arena is in the base's format"
    assert rank_width % tiles.block_r == 0, "ranks are computed in whole tiles"
    num_rank_tiles = rank_width // tiles.block_r
    row_shrink_kernel[plan.rows.shape[0], num_slices * num_rank_tiles, num_splits](
        x,
        a,
        v,
        plan.rows,
        tables.ranks,
        tables.row0,
        tables.column0,
        num_rank_tiles,
        tables.ranks.stride(0),
        x.stride(0),
        a.stride(0),
        a.stride(1),
        v.stride(0),
        v.stride(1),
        v.stride(2),
        x.shape[1],
        split_features(x.shape[1], num_splits, tiles.block_k),
        BLOCK_R=tiles.block_r,
        BLOCK_K=tiles.block_k,
        **launch_options(num_warps=tiles.num_warps),
    )


def row_expand(
    v: Tensor, y: Tensor, *, b: Tensor, tables: ModuleTables, plan: DevicePlan, tiles: RowTiles
) -> None:
    """Do what expand does, for the plan's single rows; shapes as there."""
    check_rows(y, b, v)
    check_table(plan.rows, 2)
    columns = tables.column_tiles(tiles.block_n)
    check_table(columns, 3)
    row_expand_kernel[plan.rows.shape[0], columns.shape[0]](
        v,
        b,
        y,
        plan.rows,
        columns,
        tables.ranks,
        tables.row0,
        tables.scales,
        tables.column0,
        tables.ranks.stride(0),
        v.stride(0),
        v.stride(1),
        v.stride(2),
        b.stride(0),
        y.stride(0),
        COLUMN_ALIGNMENT=tables.column_alignment,
        NUM_SPLITS=v.shape[0],
        BLOCK_R=tiles.block_r,
        BLOCK_N=tiles.block_n,
        **launch_options(num_warps=tiles.num_warps),
    )
