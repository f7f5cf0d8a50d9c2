"""Number formats in numba kernels: bf16 is stored as uint16, and all arithmetic is fp32.

`widen` and `narrow` are chosen by the array's dtype when a kernel is compiled, so that one source
serves fp32 (where both do nothing) and bf16.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

# Reassociation lets LLVM vectorise sums; NaN and infinity keep their meaning.
FAST_SUMS = {"reassoc", "contract", "nsz", "arcp"}

_LOG2_E = np.float32(1.4426950408889634)
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.3)
_HIGHEST = np.float32(88.3)


@intrinsic
def float_of_bits(_context: Any, _bits: Any) -> Any:
    """uint32 -> the float32 of the same bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of_float(_context: Any, _value: Any) -> Any:
    """float32 -> the uint32 of the same bits."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def larger_of(_context: Any, _a: Any, _b: Any) -> Any:
    """Return the larger of two float32 that aren't NaN: other than max(), a loop's vectorises."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        larger = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.f32")
        return builder.call(larger, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), codegen


def widen(value: Any) -> Any:
    """Return an array's element as float32."""
    raise NotImplementedError("runs in numba kernels only")


@overload(widen)
def _widen(value):
    if value == types.uint16:
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


@njit(inline="always")
def round_to_bf16(value: Any) -> Any:
    """Return the bits of float32 `value` in bf16, rounded to nearest even, as a uint32."""
    bits = bits_of_float(value)
    # numba makes a uint64 of what two uint32 give; cut back, or vectors hold half as many.
    high = np.uint32(bits >> np.uint32(16))
    up = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + np.uint32(high & np.uint32(1)))
    is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint32(high | np.uint32(0x40)) if is_nan else np.uint32(up >> np.uint32(16))


def narrow(value: Any, like: Any) -> Any:
    """Return float32 `value` in the format of array `like`'s elements, rounded to nearest even."""
    raise NotImplementedError("runs in numba kernels only")


@overload(narrow)
def _narrow(value, like):
    if like.dtype == types.uint16:
        return lambda value, like: np.uint16(round_to_bf16(value))
    return lambda value, like: value


@njit(fastmath=FAST_SUMS, inline="always")
def exp(x: Any) -> Any:
    """e^x in fp32, inlined, so that loops over it vectorise; relative error below 1e-7.

    Range reduction by log2 e, a polynomial, the exponent put in by bits (Cephes, expf). Below
    -87.3 the result stays tiny, above 88.3 large: callers subtract a maximum or divide.
    """
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * float_of_bits(np.uint32(np.int32(n) + np.int32(127)) << np.uint32(23))
