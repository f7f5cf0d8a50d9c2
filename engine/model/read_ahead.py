"""Memory that a step will read soon, for base products to fetch while they leave it idle."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from punica_kernels.arena import Arena
from punica_kernels.numba_dots import LINE_BYTES, PIECE_LINES

Array = np.ndarray[Any, Any]

_PIECE_BYTES = PIECE_LINES * LINE_BYTES


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """What punica_kernels.numba_linear fetches beside a product.

    pieces  [num_pieces, 2] int64: where a piece begins in layer 0, and bytes from layer to layer
    starts  [num_threads + 1] int64: which pieces each thread fetches
    """

    pieces: Array
    starts: Array


NOTHING = ReadAhead(np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.int64))


def lora_rows(arena: Arena, module: str, lora_indices: Array, starts: Array) -> ReadAhead:
    """Return the rows of adapters in a module, in the order in which numba_lora reads them.

    lora_indices  [num_segments] int64
    starts        [num_threads + 1]: which segments each thread takes

    Ranks are those of layer 0: where another layer's differ, too much or too little is fetched.
    """
    a, b = arena.a(module), arena.b(module)
    row0s = arena.tables.row0s(arena.module(module).group)[lora_indices]
    ranks = arena.tables.ranks(module)[0][:, lora_indices]
    num_slices, num_rows = a.shape[1:3]
    # For each segment the rows of a, slice by slice, then those of b.
    extents = np.empty((len(lora_indices), num_slices + 1, 3), dtype=np.int64)
    row_bytes = a.stride(2) * a.itemsize
    rows = np.arange(num_slices)[:, None] * num_rows + row0s
    extents[:, :-1, 0] = (a.data_ptr() + rows * row_bytes).T
    extents[:, :-1, 1] = (ranks * row_bytes).T
    extents[:, :-1, 2] = a.stride(0) * a.itemsize
    row_bytes = b.stride(1) * b.itemsize
    extents[:, -1, 0] = b.data_ptr() + row0s * row_bytes
    extents[:, -1, 1] = ranks.max(axis=0) * row_bytes
    extents[:, -1, 2] = b.stride(0) * b.itemsize
    addresses, num_bytes, per_layer = extents.reshape(-1, 3).T
    counts = -(-num_bytes // _PIECE_BYTES)
    before = np.concatenate(([0], np.cumsum(counts)))
    pieces = np.empty((before[-1], 2), dtype=np.int64)
    numbers = np.arange(before[-1]) - np.repeat(before[:-1], counts)
    pieces[:, 0] = np.repeat(addresses, counts) + numbers * _PIECE_BYTES
    pieces[:, 1] = np.repeat(per_layer, counts)
    return ReadAhead(pieces, before[starts * (num_slices + 1)])
