"""One streaming pass over the bytes of the tensors: NaN, infinities, and all zeros."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from adapters.peft_format import TensorRef

_CHUNK_BYTES = 4 << 20
# Masks over the raw words: all exponent bits set means NaN or infinity.
_WORDS: dict[str, tuple[np.dtype[Any], int, int]] = {
    "F32": (np.dtype("<u4"), 0x7F800000, 0x7FFFFFFF),
    "F16": (np.dtype("<u2"), 0x7C00, 0x7FFF),
    "BF16": (np.dtype("<u2"), 0x7F80, 0x7FFF),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What its raw words say of a tensor's values."""

    has_nan: bool
    has_infinity: bool
    is_all_zero: bool


def scan_tensors(tensors: Iterable[TensorRef]) -> dict[str, TensorFacts]:
    """Read every tensor once, in the order of the file, and return the facts by name.

    Memory stays at a few MiB whatever the size of the tensors.
    """
    facts: dict[str, TensorFacts] = {}
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.file), tensor.offset)):
        with tensor.file.open("rb") as file:
            facts[tensor.name] = _scan(file, tensor)
    return facts


def _scan(file: BinaryIO, tensor: TensorRef) -> TensorFacts:
    word, exponent, magnitude = _WORDS[tensor.dtype]
    has_nan = has_infinity = False
    is_all_zero = True
    file.seek(tensor.offset)
    left = tensor.num_bytes
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise OSError(f"the file ended inside {tensor.name}")
        left -= len(chunk)
        words = np.frombuffer(chunk, dtype=word) & word.type(magnitude)
        is_all_zero = is_all_zero and not words.any()
        largest = int(words.max())
        # Among magnitudes, infinity is the exponent mask itself and every NaN is above it.
        if largest >= exponent:
            has_nan = has_nan or largest > exponent
            has_infinity = has_infinity or bool((words == exponent).any())
    return TensorFacts(has_nan=has_nan, has_infinity=has_infinity, is_all_zero=is_all_zero)
