"""Writes a step's K and V into their cells."""

import triton
import triton.language as tl
from torch import Tensor

from punica_kernels.triton_launch import check_rows, launch_options
from punica_kernels.triton_tiles import next_power_of_2


@triton.jit
def store_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_cells_ptr: tl.tensor,
    v_cells_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    block_stride: tl.tensor,
    offset_stride: tl.tensor,
    head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Copy one token's K and V, all heads of it."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    e = tl.arange(0, BLOCK_E)
    mask = e < NUM_KV_HEADS * HEAD_DIM
    cell = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * offset_stride
    place = cell + (e // HEAD_DIM) * head_stride + e % HEAD_DIM
    tl.store(k_cells_ptr + place, tl.load(k_ptr + token * k_stride + e, mask=mask), mask=mask)
    tl.store(v_cells_ptr + place, tl.load(v_ptr + token * v_stride + e, mask=mask), mask=mask)


def store_kv(k: Tensor, v: Tensor, *, k_cells: Tensor, v_cells: Tensor, kv_slots: Tensor) -> None:
    """Write k[t], v[t] to the cell kv_slots[t]; a slot of -1 is padding and writes nothing.

    k, v              [num_tokens, num_kv_heads, head_dim]; rows may be wider than their heads
    k_cells, v_cells  [num_blocks, block_size, num_kv_heads, head_dim], a layer's; as k
    kv_slots          [num_tokens] int64, all different
    """
    check_rows(k, v, k_cells, v_cells)
    assert k.dtype is k_cells.dtype, "the cells are in the base's format"
    assert k_cells.stride() == v_cells.stride(), "K and V are laid out alike"
    assert k.stride(1) == v.stride(1) == k.shape[2], "the heads of a row lie side by side"
    store_kernel[(k.shape[0],)](
        k,
        v,
        k_cells,
        v_cells,
        kv_slots,
        k.stride(0),
        v.stride(0),
        k_cells.stride(0),
        k_cells.stride(1),
        k_cells.stride(2),
        BLOCK_SIZE=k_cells.shape[1],
        NUM_KV_HEADS=k.shape[1],
        HEAD_DIM=k.shape[2],
        BLOCK_E=next_power_of_2(k.shape[1] * k.shape[2]),
        **launch_options(num_warps=4),
    )
