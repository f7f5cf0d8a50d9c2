"""Casting adapter weights to the arena's number format, in numpy, which has no bfloat16."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The raw words of each arena format.
IMAGE_WORDS: dict[str, np.dtype[Any]] = {"bf16": np.dtype("<u2"), "fp32": np.dtype("<f4")}

_BF16_EXPONENT = np.uint16(0x7F80)


class NumberOutOfRange(Exception):
    """A finite weight is too large for the arena's number format."""


def to_words(values: Array, *, source: str, dtype: str) -> Array:
    """Return `values` as words of `dtype` ("bf16" or "fp32"), in the same shape.

    source  "F32", "F16" or "BF16" (then `values` are uint16 words)

    Widening is exact; narrowing rounds to nearest, ties to even. Raises NumberOutOfRange where a
    finite value would become infinite.
    """
    if source == "BF16":
        return values if dtype == "bf16" else _widened(values)
    wide = values.astype(np.float32, copy=False)
    return wide if dtype == "fp32" else _narrowed(wide)


def _widened(words: Array) -> Array:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _narrowed(values: Array) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Adding half a unit, less one if the kept part is even, carries exactly when it must.
    words = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    if ((words & _BF16_EXPONENT) == _BF16_EXPONENT).any():
        largest = float(np.abs(values).max())
        raise NumberOutOfRange(f"a weight of {largest:.4g} is too large for bf16")
    return words
