"""Reads the header of a safetensors file strictly, without allocating any tensor."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.limits import MAX_HEADER_BYTES
from adapters.peft_config import LFS_POINTER_START, LFS_POINTER_TEXT
from adapters.peft_format import WORD_TYPES, TensorRef
from adapters.strict_json import NotStrictJson, parse_strict_json

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderReading:
    """The tensors of a file in the order of their bytes; empty when the header can't be read."""

    tensors: tuple[TensorRef, ...] = ()
    problems: tuple[str, ...] = ()


def read_header(path: Path) -> HeaderReading:
    """Read where each tensor lies, and list everything that is wrong with the layout.

    Reads the header only: a file of any length costs at most MAX_HEADER_BYTES of memory.
    """
    header = _load(path)
    if isinstance(header, str):
        return HeaderReading(problems=(f"{path.name} {header}",))
    fields, data_start, file_bytes = header
    tensors: list[TensorRef] = []
    problems: list[str] = []
    for name, entry in fields.items():
        if name == "__metadata__":
            problems += _metadata_problems(entry)
            continue
        tensor = _tensor(path, name, entry, data_start)
        if isinstance(tensor, str):
            problems.append(tensor)
        else:
            tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    if not problems:
        problems += _layout_problems(tensors, data_start, file_bytes)
    return HeaderReading(
        tensors=tuple(tensors), problems=tuple(f"{path.name}: {text}" for text in problems)
    )


def _load(path: Path) -> tuple[dict[str, Any], int, int] | str:
    with path.open("rb") as file:
        file_bytes = path.stat().st_size
        start = file.read(_LENGTH_BYTES)
        if LFS_POINTER_START.startswith(start) and len(start) == _LENGTH_BYTES:
            return LFS_POINTER_TEXT
        if len(start) < _LENGTH_BYTES:
            return f"has only {file_bytes} bytes, so it isn't a safetensors file"
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER_BYTES:
            return (
                f"isn't a safetensors file, or a broken one: its header claims {length} bytes, "
                f"and at most {MAX_HEADER_BYTES} are read"
            )
        if length > file_bytes - _LENGTH_BYTES:
            return (
                f"is truncated: its header claims {length} bytes, and only "
                f"{file_bytes - _LENGTH_BYTES} are left in the file"
            )
        raw = file.read(length)
    try:
        fields = parse_strict_json(raw)
    except NotStrictJson as error:
        return f"has a broken header: {error}"
    if not isinstance(fields, dict):
        return "has a broken header: it isn't a JSON object"
    return fields, _LENGTH_BYTES + length, file_bytes


def _metadata_problems(entry: Any) -> list[str]:
    if isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values()):
        return []
    return ["__metadata__ must be an object of texts"]


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorRef | str:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return f"{name[:200]} must have dtype, shape and data_offsets, and nothing else"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WORD_TYPES:
        return f"{name[:200]} has dtype {str(dtype)[:40]}: only F32, F16 and BF16 are served"
    if not _are_counts(shape) or len(shape) > 8:
        return f"{name[:200]} has a shape that isn't a short list of whole numbers"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"{name[:200]} has data_offsets that aren't a begin and an end"
    num_bytes = math.prod(shape) * WORD_TYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        return (
            f"{name[:200]} of shape {shape} in {dtype} takes {num_bytes} bytes, but its "
            f"data_offsets span {offsets[1] - offsets[0]}"
        )
    return TensorRef(
        file=path,
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset=data_start + offsets[0],
        num_bytes=num_bytes,
    )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 48
        for item in value
    )


def _layout_problems(tensors: list[TensorRef], data_start: int, file_bytes: int) -> list[str]:
    end = data_start
    for tensor in tensors:
        if tensor.offset < end:
            return [f"{tensor.name[:200]} overlaps the tensor before it"]
        if tensor.offset > end:
            return [f"{tensor.offset - end} bytes before {tensor.name[:200]} belong to no tensor"]
        end = tensor.offset + tensor.num_bytes
    if end > file_bytes:
        return [
            f"the file is truncated: its tensors end at byte {end}, but it has {file_bytes} bytes"
        ]
    if end < file_bytes:
        return [f"{file_bytes - end} bytes after the last tensor belong to none"]
    return []
