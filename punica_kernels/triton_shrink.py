"""Chunked SGMV, first half: every tile of a segment into its adapter's rank space."""

import triton
import triton.language as tl
from torch import Tensor

from punica_kernels.device_plan import DevicePlan, ModuleTables
from punica_kernels.triton_launch import check_rows, check_table, dot, dot_options, launch_options
from punica_kernels.triton_tiles import LoraTiles


@triton.jit(do_not_specialize=["column0", "num_rank_tiles"])
def shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute v[split, slice, rows of a tile, BLOCK_R ranks] over one split of K."""
    tile, split = tl.program_id(0), tl.program_id(2)
    slice_index = tl.program_id(1) // num_rank_tiles
    rank0 = (tl.program_id(1) % num_rank_tiles) * BLOCK_R
    first_row = tl.load(tiles_ptr + tile * 3)
    num_rows = tl.load(tiles_ptr + tile * 3 + 1)
    entry = tl.load(tiles_ptr + tile * 3 + 2) * table_stride + column0 + slice_index
    rank = tl.load(ranks_ptr + entry)
    if (num_rows == 0) | (rank0 >= rank):
        return
    m = tl.arange(0, BLOCK_M)
    r = rank0 + tl.arange(0, BLOCK_R)
    row = (first_row + m).to(tl.int64)
    arena_row = (tl.load(row0_ptr + entry) + r).to(tl.int64)
    x_rows = x_ptr + row[:, None] * x_stride
    a_rows = a_ptr + slice_index.to(tl.int64) * a_slice_stride + arena_row[:, None] * a_stride
    row_mask, rank_mask = (m < num_rows)[:, None], (r < rank)[:, None]
    k_stop = tl.minimum((split + 1) * split_features, in_features)
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for k0 in range(split * split_features, k_stop, BLOCK_K):
        k = (k0 + tl.arange(0, BLOCK_K))[None, :]
        x = tl.load(x_rows + k, mask=row_mask & (k < k_stop), other=0.0)
        a = tl.load(a_rows + k, mask=rank_mask & (k < k_stop), other=0.0)
        acc = dot(x, tl.trans(a), acc, WIDEN, PRECISION)
    v_tile = v_ptr + split.to(tl.int64) * v_split_stride + slice_index.to(tl.int64) * v_slice_stride
    v_place = v_tile + row[:, None] * v_stride + r[None, :]
    # Behind the rank stand zeros, so that an expand can read whole steps.
    tl.store(v_place, acc, mask=row_mask)


def shrink(
    x: Tensor, v: Tensor, *, a: Tensor, tables: ModuleTables, plan: DevicePlan, tiles: LoraTiles
) -> None:
    """Project every row of the plan's tiles into its adapter's rank space.

        v[split, slice, t, :rank] = x[t, split's columns] @ a[slice, row0 : row0 + rank].T

    x  [num_tokens, in]
    a  [num_slices, num_rows, in], a layer of the arena
    v  [num_splits, num_slices, num_tokens, rank_width] fp32, rank_width a multiple of block_r;
       written up to each adapter's own rank, and zeros up to a multiple of block_r
    """
    num_splits, num_slices, _, rank_width = v.shape
    check_rows(x, a, v)
    check_table(plan.tiles, 3)
    assert a.dtype is x.dtype, "the arena is in the base's format"
    assert plan.block_m == tiles.block_m, "the plan was cut for these tiles"
    assert rank_width % tiles.block_r == 0, "ranks are computed in whole tiles"
    num_rank_tiles = rank_width // tiles.block_r
    shrink_kernel[plan.tiles.shape[0], num_slices * num_rank_tiles, num_splits](
        x,
        a,
        v,
        plan.tiles,
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
        BLOCK_M=tiles.block_m,
        BLOCK_R=tiles.block_r,
        BLOCK_K=tiles.block_k,
        **dot_options(x.dtype),
        **launch_options(num_warps=tiles.shrink_warps, num_stages=tiles.num_stages),
    )


def split_features(in_features: int, num_splits: int, block_k: int) -> int:
    """Return the columns of one split: whole steps of the loop, so that none is cut."""
    return int(triton.cdiv(triton.cdiv(in_features, num_splits), block_k) * block_k)
