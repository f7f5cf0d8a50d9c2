"""Chunked SGMV, second half: out of the rank space, scaled, onto the module's output."""

import triton
import triton.language as tl
from torch import Tensor

from punica_kernels.device_plan import DevicePlan, ModuleTables
from punica_kernels.triton_launch import check_rows, check_table, dot, dot_options, launch_options
from punica_kernels.triton_tiles import LoraTiles


@triton.jit(do_not_specialize=["column0"])
def expand_kernel(
    v_ptr: tl.tensor,
    b_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Add scale · v b to y[rows of a tile, BLOCK_N columns of one slice]."""
    tile, column_tile = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles_ptr + tile * 3)
    num_rows = tl.load(tiles_ptr + tile * 3 + 1)
    slice_index = tl.load(columns_ptr + column_tile * 3)
    first_column = tl.multiple_of(tl.load(columns_ptr + column_tile * 3 + 1), COLUMN_ALIGNMENT)
    num_columns = tl.multiple_of(tl.load(columns_ptr + column_tile * 3 + 2), COLUMN_ALIGNMENT)
    entry = tl.load(tiles_ptr + tile * 3 + 2) * table_stride + column0 + slice_index
    rank = tl.load(ranks_ptr + entry)
    if (num_rows == 0) | (rank == 0):
        return
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    row_mask = (m < num_rows)[:, None]
    column_mask = (n < num_columns)[None, :]
    row = (first_row + m).to(tl.int64)[:, None]
    column = (first_column + n)[None, :]
    row0 = tl.load(row0_ptr + entry)
    v_rows = v_ptr + slice_index.to(tl.int64) * v_slice_stride + row * v_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for rank0 in range(0, rank, BLOCK_R):
        r = rank0 + tl.arange(0, BLOCK_R)
        # Behind the rank v is 0, up to a whole step.
        v = tl.load(v_rows + r[None, :], mask=row_mask, other=0.0)
        v_part = v_rows + r[None, :]
        for _ in tl.static_range(1, NUM_SPLITS):
            v_part += v_split_stride
            v += tl.load(v_part, mask=row_mask, other=0.0)
        b_rows = b_ptr + (row0 + r).to(tl.int64)[:, None] * b_stride
        b = tl.load(b_rows + column, mask=(r < rank)[:, None] & column_mask, other=0.0)
        acc = dot(v, b.to(tl.float32), acc, WIDEN, PRECISION)
    y_place = y_ptr + row * y_stride + column
    y_mask = row_mask & column_mask
    y = tl.load(y_place, mask=y_mask, other=0.0).to(tl.float32)
    y += tl.load(scales_ptr + entry) * acc
    tl.store(y_place, y.to(y_ptr.dtype.element_ty), mask=y_mask)


def expand(
    v: Tensor, y: Tensor, *, b: Tensor, tables: ModuleTables, plan: DevicePlan, tiles: LoraTiles
) -> None:
    """Add every tile's part to the module's output, in place; all slices in one launch.

        y[t, columns of slice] += scale · (Σ_split v[split, slice, t]) @ b[span, columns of slice]

    v  [num_splits, num_slices, num_tokens, rank_width] fp32; splits are added in their order
    b  [num_rows, out], a layer of the arena
    y  [num_tokens, out]; rounded to its format once
    """
    check_rows(y, b, v)
    check_table(plan.tiles, 3)
    columns = tables.column_tiles(tiles.block_n)
    check_table(columns, 3)
    expand_kernel[plan.tiles.shape[0], columns.shape[0]](
        v,
        b,
        y,
        plan.tiles,
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
        BLOCK_M=tiles.block_m,
        BLOCK_R=tiles.block_r,
        BLOCK_N=tiles.block_n,
        **dot_options(b.dtype),
        # Few ranks are few steps, not worth a pipeline.
        **launch_options(num_warps=tiles.expand_warps, num_stages=1),
    )
