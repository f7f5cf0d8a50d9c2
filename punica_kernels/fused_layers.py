"""The small steps of a layer, each one kernel that reads and writes its rows once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from punica_kernels.triton_launch import check_rows, launch_options
from punica_kernels.triton_tiles import next_power_of_2

_MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["eps"])
def norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    x_stride: tl.tensor,
    x_head_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    out_head_stride: tl.tensor,
    weight_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ADDS_RESIDUAL: tl.constexpr,
) -> None:
    """Norm one row, or one head of it; add it to the residual first where there is one."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    mask = w < WIDTH
    x_place = x_ptr + row * x_stride + head * x_head_stride + w
    x = tl.load(x_place, mask=mask, other=0.0)
    if ADDS_RESIDUAL:
        place = residual_ptr + row * residual_stride + w
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)
        x = total.to(x.dtype)
        tl.store(place, x, mask=mask)
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / WIDTH
    # Rounded before the weight comes in, as the checkpoints were trained.
    normed = (wide * tl.rsqrt(mean_square + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + head * weight_stride + w, mask=mask, other=0.0).to(tl.float32)
    out_place = out_ptr + row * out_stride + head * out_head_stride + w
    tl.store(out_place, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    x_stride: tl.tensor,
    cos_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Turn all heads of one row by its position."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    mask = e < NUM_HEADS * HALF
    column = e % HALF
    place = x_ptr + row * x_stride + (e // HALF) * (2 * HALF) + column
    low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    # The table's sin is negative in its first half; the second half has the angle's own sign.
    cos = tl.load(cos_ptr + row * cos_stride + column, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * cos_stride + HALF + column, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(place, (low * cos - high * sin).to(dtype), mask=mask)
    tl.store(place + HALF, (high * cos + low * sin).to(dtype), mask=mask)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK_W: tl.constexpr,
) -> None:
    """Gate BLOCK_W columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = w < width
    gate_place = gate_up_ptr + row * gate_up_stride + w
    gate = tl.load(gate_place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_place + width, mask=mask, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + w, gated.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight over the last dimension, the first factor in fp32.

    x       [num_tokens, width], or [num_tokens, num_heads, width] normed head by head
    weight  [width], or [num_heads, width]
    """
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    weights = weight if weight.dim() == 2 else weight.unsqueeze(0)
    assert weights.shape == heads.shape[1:], "a weight for each element of a row"
    out = torch.empty(heads.shape, dtype=x.dtype, device=x.device)
    _norm(heads, None, weights, out, eps)
    return out.view(x.shape)


def add_rms_norm(residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add y to the residual in place and return the norm of the sum.

        residual += y;  returns residual / rms(residual) · weight

    residual, y  [num_tokens, width], weight [width]; the sum is rounded to its format first
    """
    assert y.shape == residual.shape, "y belongs to the residual's rows"
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    _norm(y.unsqueeze(1), residual, weight.unsqueeze(0), out.unsqueeze(1), eps)
    return out


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Turn each head by its row's position, in place.

        heads = heads · cos + (heads with their halves swapped) · signed_sin

    heads            [num_tokens, num_heads, head_dim]; rows may be wider than their heads
    cos, signed_sin  [num_tokens, head_dim] of the rows' positions; the sign of the turn is in
                     signed_sin, negative in its first half, and both halves have one angle
    """
    check_rows(heads, cos, signed_sin)
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.stride(1) == head_dim, "the heads of a row lie side by side"
    assert cos.shape == signed_sin.shape == (num_tokens, head_dim), "one angle a row and pair"
    assert cos.stride() == signed_sin.stride(), "both tables are laid out alike"
    rotary_kernel[(num_tokens,)](
        heads,
        cos,
        signed_sin,
        heads.stride(0),
        cos.stride(0),
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        BLOCK_E=next_power_of_2(num_heads * head_dim // 2),
        **launch_options(num_warps=4),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up of gate_up [num_tokens, 2 · width], as [num_tokens, width]."""
    check_rows(gate_up)
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block_w = min(next_power_of_2(width), _MAX_BLOCK)
    silu_mul_kernel[num_tokens, triton.cdiv(width, block_w)](
        gate_up,
        out,
        width,
        gate_up.stride(0),
        out.stride(0),
        BLOCK_W=block_w,
        **launch_options(num_warps=4),
    )
    return out


def _norm(heads: Tensor, residual: Tensor | None, weights: Tensor, out: Tensor, eps: float) -> None:
    check_rows(heads, weights, out, *([] if residual is None else [residual]))
    num_tokens, num_heads, width = heads.shape
    block_w = next_power_of_2(width)
    norm_kernel[num_tokens, num_heads](
        heads,
        heads if residual is None else residual,
        weights,
        out,
        eps,
        heads.stride(0),
        heads.stride(1),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        out.stride(1),
        weights.stride(0),
        WIDTH=width,
        BLOCK_W=block_w,
        ADDS_RESIDUAL=residual is not None,
        **launch_options(num_warps=4 if width <= 4096 else 8),
    )
