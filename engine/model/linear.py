"""The one place where a base product happens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """One or several linear modules of the same input, laid in one weight, run as one product.

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

    def product(self, x: torch.Tensor) -> torch.Tensor:  # [num_tokens, in] -> [num_tokens, out]
        """Return x Wᵀ + bias, freshly allocated: the caller may write to it."""
        return F.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return self.weight.nbytes + bias_bytes


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
