"""The one place where a base product happens: by torch's own product, or over weights that the
matrix library has laid out for itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

# The row count that the library lays weights out for; other counts work, too.
_PREPACKED_FOR_ROWS = 32
_MAX_RELATIVE_GAP = 2.0**-6  # of two products in bf16 that round once each


class BaseLinear(Protocol):
    """One or several linear modules of the same input, run as one product."""

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""

    def product(self, x: torch.Tensor) -> torch.Tensor:  # [num_tokens, in] -> [num_tokens, out]
        """Return x Wᵀ + bias, freshly allocated: the caller may write to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """Several modules laid in one weight, multiplied by torch's own product.

    weight               [out_features, in_features]
    bias                 [out_features] or None; zeros for a slice that has none
    slice_out_features   columns of each module in the output, in order
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    slice_out_features: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.weight.is_contiguous(), "a base weight is one contiguous matrix"
        assert sum(self.slice_out_features) == self.weight.shape[0], "slices cover the columns"

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + bias."""
        return F.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return self.weight.nbytes + bias_bytes


class PrepackedLinear:
    """A bf16 weight in oneDNN's own layout: twice as fast as torch's product at small batches.

    The operators are not public API of torch. `prepack` is the only way in, and checks them.
    """

    __slots__ = ("bias", "num_bytes", "weight")

    def __init__(self, linear: PackedLinear) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight, _PREPACKED_FOR_ROWS)
        self.bias = linear.bias
        self.num_bytes = linear.num_bytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + bias."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return result


# Returns None where our kernels can't read the library's layout.
LayOver = Callable[[PrepackedLinear, PackedLinear], BaseLinear | None]


def prepack(linear: PackedLinear, lay_over: LayOver | None = None) -> BaseLinear:
    """Return `linear` in the library's own layout, or itself where that doesn't work or agree.

    Checked on this very weight: a library that is missing, too old or wrong is not used.

    lay_over  may put kernels of our own over the library's weight; checked likewise
    """
    if linear.weight.dtype is not torch.bfloat16 or linear.weight.device.type != "cpu":
        return linear
    try:
        packed = PrepackedLinear(linear)
        if not _agree(packed, linear):
            return linear
        ours = None if lay_over is None else lay_over(packed, linear)
    except (AttributeError, RuntimeError, TypeError):
        return linear
    return ours if ours is not None and _agree(ours, linear) else packed


def _agree(packed: BaseLinear, linear: PackedLinear) -> bool:
    in_features = linear.weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 3, 6):
        x = torch.randn(num_rows, in_features, generator=generator).to(torch.bfloat16)
        got, expected = packed.product(x).float(), linear.product(x).float()
        if not (got - expected).abs().max() <= _MAX_RELATIVE_GAP * expected.abs().max():
            return False
    return True


def unpacked(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Return a PackedLinear of a single module."""
    return PackedLinear(weight=weight, bias=bias, slice_out_features=(weight.shape[0],))


def slice_rows(slice_out_features: Sequence[int]) -> list[slice]:
    """Return where each module's rows lie in the packed weight."""
    rows, start = [], 0
    for out_features in slice_out_features:
        rows.append(slice(start, start + out_features))
        start += out_features
    return rows
