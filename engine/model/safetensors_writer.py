"""Writes a safetensors file one tensor at a time, so that memory holds one tensor, not all."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """A tensor to be written; `values` makes its contiguous little-endian content when called."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], npt.NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the content."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(path: Path, plans: Sequence[TensorPlan]) -> None:
    """Write and fsync `path`; wide formats first, so that every tensor is aligned."""
    ordered = sorted(plans, key=lambda plan: -_ITEM_BYTES[plan.dtype])
    with path.open("wb") as file:
        file.write(_header(ordered))
        for plan in ordered:
            content = plan.values()
            assert content.nbytes == plan.num_bytes, "a tensor has the size that was promised"
            content.tofile(file)
        file.flush()
        os.fsync(file.fileno())


def _header(plans: Sequence[TensorPlan]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        entries[plan.name] = {
            "dtype": plan.dtype,
            "shape": list(plan.shape),
            "data_offsets": [offset, offset + plan.num_bytes],
        }
        offset += plan.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
