"""The small steps of a layer are those of torch."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from punica_kernels.fused_layers import add_rms_norm, rms_norm, rotate, silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}
EPS = 1e-5

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(device=device, dtype=dtype)


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, EPS) * weight


@pytest.mark.parametrize("width", [8, 100, 576])
def test_rms_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (randn(*shape, width, dtype=dtype, device=device) for shape in ((5,), ()))
    torch.testing.assert_close(rms_norm(x, weight, EPS), torch_norm(x, weight), **TOLERANCES[dtype])


def test_heads_are_normed_one_by_one(dtype: torch.dtype, device: torch.device) -> None:
    """A view of a fused product's rows, each head with weights of its own."""
    heads = randn(3, 6, 16, dtype=dtype, device=device)[:, :4]
    weight = randn(4, 16, dtype=dtype, device=device)
    torch.testing.assert_close(
        rms_norm(heads, weight, EPS), torch_norm(heads, weight), **TOLERANCES[dtype]
    )


def test_the_residual_grows_before_it_is_normed(dtype: torch.dtype, device: torch.device) -> None:
    y = randn(4, 48, dtype=dtype, device=device)
    residual, weight = y.flip(0), randn(48, dtype=dtype, device=device)
    total = residual + y
    normed = add_rms_norm(residual, y, weight, EPS)
    # The interpreter cuts to bf16 where devices and torch round.
    last_place = 2**-7 if dtype is torch.bfloat16 else 0
    torch.testing.assert_close(residual, total, rtol=last_place, atol=0)
    torch.testing.assert_close(normed, torch_norm(total, weight), **TOLERANCES[dtype])


@pytest.mark.parametrize(("num_heads", "head_dim"), [(3, 16), (5, 12)])
def test_heads_turn_in_place(
    num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Only these heads of the row, the others stay."""
    row = randn(4, num_heads + 2, head_dim, dtype=dtype, device=device)
    angles = randn(4, head_dim // 2, dtype=torch.float32, device=device)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    heads, others = row[:, :num_heads], row[:, num_heads:].clone()
    swapped = torch.roll(heads, head_dim // 2, -1)
    wanted = heads.float() * cos[:, None].float() + swapped.float() * signed_sin[:, None].float()
    rotate(heads, cos, signed_sin)
    torch.testing.assert_close(heads, wanted.to(dtype), **TOLERANCES[dtype])
    assert torch.equal(row[:, num_heads:], others)


@pytest.mark.parametrize("width", [5, 64, 1500])
def test_silu_mul(width: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = randn(3, 2 * width, dtype=dtype, device=device)
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(
        silu_mul(gate_up), (F.silu(gate) * up).to(dtype), **TOLERANCES[dtype]
    )
