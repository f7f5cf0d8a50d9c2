"""Base products by a kernel of our own, over the weight that oneDNN has laid out."""

import ctypes
from typing import Any

import numpy as np
import torch

from engine.model.linear import PackedLinear, PrepackedLinear
from engine.model.read_ahead import NOTHING, ReadAhead
from engine.model.shares import even_cuts
from punica_kernels import numba_linear
from punica_kernels.numba_dots import PANEL_COLUMNS
from punica_kernels.words import PAIRS, Words, words


class PanelLinear:
    """Reads the library's own memory: there is one copy of the weight.

    `over` is the only way in; a weight that isn't in panels has none.
    """

    __slots__ = ("_initial", "_no_pieces", "_packed", "_panels", "_starts", "num_bytes")

    def __init__(self, packed: PrepackedLinear, panels: np.ndarray[Any, Any], width: int) -> None:
        self._packed = packed  # owns what `panels` looks at
        self._panels = panels
        bias = torch.zeros(width) if packed.bias is None else packed.bias.float()
        self._initial = bias.numpy()
        num_units = width // numba_linear.UNIT_COLUMNS
        cuts = even_cuts(num_units, min(torch.get_num_threads(), num_units))
        self._starts = np.array([0, *(stop for _, stop in cuts)], dtype=np.int64)
        self._no_pieces = np.zeros_like(self._starts)
        self.num_bytes = packed.num_bytes

    @classmethod
    def over(cls, packed: PrepackedLinear, linear: PackedLinear) -> "PanelLinear | None":
        """Return the product over `packed`, or None where it isn't `linear`'s weight in panels."""
        width, depth = linear.weight.shape
        num_bytes: int = torch.ops.mkldnn._nbytes(packed.weight)
        if width % PANEL_COLUMNS or depth % 2 or num_bytes != linear.weight.nbytes:
            return None
        address = ctypes.cast(
            torch.ops.mkldnn.data_ptr(packed.weight), ctypes.POINTER(ctypes.c_uint32)
        )
        panels = np.ctypeslib.as_array(address, (num_bytes // PAIRS().itemsize,))
        pairs = words(linear.weight).view(PAIRS)
        expected = pairs.reshape(-1, PANEL_COLUMNS, depth // 2).transpose(0, 2, 1)
        if not np.array_equal(panels.reshape(expected.shape), expected):
            return None
        return cls(packed, panels, width)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + bias."""
        out = torch.empty((x.shape[0], len(self._initial)), dtype=torch.bfloat16)
        self.multiply(words(x).view(PAIRS), words(out))
        return out

    def multiply(self, x: Words, out: Words, *, ahead: ReadAhead = NOTHING, layer: int = 0) -> None:
        """Put x Wᵀ + bias into out; fetch meanwhile what is read in `layer`, if there is time.

        x    [num_tokens, in / 2] pairs
        out  [num_tokens, out] words of bf16
        """
        fits = len(ahead.starts) == len(self._starts)
        numba_linear.multiply(
            x,
            self._panels,
            self._initial,
            self._starts,
            out,
            ahead.pieces,
            ahead.starts if fits else self._no_pieces,
            layer,
        )
