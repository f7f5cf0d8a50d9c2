"""The arena's tables as arrays that kernels read: whose rows, which rank, which scale."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_FIRST_CAPACITY = 8


class ArenaTables:
    """Rows, ranks and scales by lora_index. Only Arena writes; arrays are replaced when they grow.

    A lora_index that means nothing has rank 0 everywhere.
    """

    def __init__(self, *, groups: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]) -> None:
        """`shapes` gives [num_layers, num_slices] of each module."""
        self._row0s = {group: np.zeros(_FIRST_CAPACITY, dtype=np.int64) for group in groups}
        self._ranks = {
            module: np.zeros((*shape, _FIRST_CAPACITY), dtype=np.int64)
            for module, shape in shapes.items()
        }
        self._scales = {
            module: np.zeros((*shape, _FIRST_CAPACITY), dtype=np.float32)
            for module, shape in shapes.items()
        }
        self._capacity = _FIRST_CAPACITY
        self.generation = 0  # counts how often the arrays were replaced

    def row0s(self, group: str) -> Array:
        """Return the first row of each adapter's span, [capacity] int64."""
        return self._row0s[group]

    def ranks(self, module: str) -> Array:
        """Return [num_layers, num_slices, capacity] int64."""
        return self._ranks[module]

    def scales(self, module: str) -> Array:
        """Return [num_layers, num_slices, capacity] fp32."""
        return self._scales[module]

    def set_rows(self, lora_index: int, group: str, row0: int) -> None:
        """Say where an adapter's span in a group begins."""
        self._reach(lora_index)
        self._row0s[group][lora_index] = row0

    def set_module(self, lora_index: int, module: str, ranks: Any, scales: Any) -> None:
        """Set an adapter's ranks and scales in a module, [num_layers][num_slices] each."""
        self._reach(lora_index)
        self._ranks[module][:, :, lora_index] = ranks
        self._scales[module][:, :, lora_index] = scales

    def clear(self, lora_index: int) -> None:
        """Make `lora_index` mean nothing."""
        if lora_index < self._capacity:
            for ranks in self._ranks.values():
                ranks[:, :, lora_index] = 0

    def _reach(self, lora_index: int) -> None:
        if lora_index < self._capacity:
            return
        extra = max(self._capacity, lora_index + 1 - self._capacity)
        for tables in (self._row0s, self._ranks, self._scales):
            for name, table in tables.items():
                grown = np.zeros((*table.shape[:-1], extra), dtype=table.dtype)
                tables[name] = np.concatenate((table, grown), axis=-1)
        self._capacity += extra
        self.generation += 1
