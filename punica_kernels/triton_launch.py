"""What every Triton launch has in common: its checks, its options, and how a dot is taken."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def interpreting() -> bool:
    """Say whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def launch_options(*, num_warps: int, num_stages: int = 2) -> dict[str, Any]:
    """Return the options of a launch. Products and sums may fuse; said here, not left to Triton."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}


def dot_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of a dot whose operands are in `dtype`.

    WIDEN      the interpreter's dot of bf16 is wrong, so there operands are widened first
    PRECISION  of a dot in fp32: exact products; where the weights have 16 bits, each operand is
               taken as two of bf16, which keeps 16 bits of v at the speed of bf16
    """
    exact = dtype is torch.float32 or interpreting()
    return {"WIDEN": interpreting(), "PRECISION": "ieee" if exact else "bf16x3"}


def check_rows(*tensors: Tensor) -> None:
    """Assert what all kernels expect of their large tensors."""
    first = tensors[0]
    for tensor in tensors:
        assert tensor.device == first.device, "all tensors of a launch are on one device"
        assert tensor.dtype in DTYPES, f"{tensor.dtype} is no format of these kernels"
        assert tensor.stride(-1) == 1, "elements of a row lie side by side"
        assert interpreting() or tensor.device.type != "cpu", "only the interpreter runs on a CPU"


def check_table(table: Tensor, width: int) -> None:
    """Assert what all kernels expect of a small table of integers."""
    assert table.dtype is torch.int32, "tables are int32"
    assert table.shape[-1] == width, f"a line of the table has {width} numbers"
    assert table.is_contiguous(), "tables are contiguous"


@triton.jit
def dot(
    a: tl.tensor, b: tl.tensor, acc: tl.tensor, WIDEN: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Return acc + a @ b in fp32."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
