"""Rows of bf16 read two elements at a time: the loops inside the LoRA kernels.

A uint32 holds a *pair*: the first element in its low half, the second in its high half, on the
little-endian machines that torch serves. One shift or one mask widens sixteen elements of a vector,
where a uint16 each would first have to be spread. A row's pairs come out as all first elements and
all second ones, so a *wide* row keeps them apart: fp32 [2n], firsts before seconds. Sums don't
mind, and what is added up is paired again when it is rounded.

Rows of other formats are taken element by element, in their own order. Which it is follows from the
row's dtype, at compile time.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from punica_kernels.numba_floats import float_of_bits, narrow, round_to_bf16, widen

_HIGH_HALF = np.uint32(0xFFFF0000)
_HALF = np.uint32(16)
_LINE_BYTES = 64


@njit(inline="always")
def _first(pair: Any) -> Any:
    return float_of_bits(np.uint32(pair << _HALF))


@njit(inline="always")
def _second(pair: Any) -> Any:
    return float_of_bits(np.uint32(pair & _HIGH_HALF))


def elements_of(row: Any) -> int:
    """Return how many elements of a wide row one element of `row` stands for: 2 for pairs."""
    raise NotImplementedError("runs in numba kernels only")


@overload(elements_of)
def _elements_of(row):
    return (lambda row: 2) if row.dtype == types.uint32 else (lambda row: 1)


def spread(row: Any, wide: Any) -> None:
    """wide = row, in fp32."""
    raise NotImplementedError("runs in numba kernels only")


@overload(spread, inline="always")
def _spread(row, wide):
    def pairs(row, wide):
        n = row.shape[0]
        firsts, seconds = wide[:n], wide[n:]
        for i in range(n):
            firsts[i] = _first(row[i])
            seconds[i] = _second(row[i])

    def single(row, wide):
        for i in range(row.shape[0]):
            wide[i] = widen(row[i])

    return pairs if row.dtype == types.uint32 else single


def dot(wide: Any, row: Any) -> Any:
    """Return wide · row."""
    raise NotImplementedError("runs in numba kernels only")


@overload(dot, inline="always")
def _dot(wide, row):
    def pairs(wide, row):
        n = row.shape[0]
        firsts, seconds = wide[:n], wide[n:]
        total, other = np.float32(0.0), np.float32(0.0)
        for i in range(n):
            total += firsts[i] * _first(row[i])
            other += seconds[i] * _second(row[i])
        return total + other

    def single(wide, row):
        total = np.float32(0.0)
        for i in range(row.shape[0]):
            total += wide[i] * widen(row[i])
        return total

    return pairs if row.dtype == types.uint32 else single


def add_scaled(wide: Any, factor: Any, row: Any) -> None:
    """wide += factor * row."""
    raise NotImplementedError("runs in numba kernels only")


@overload(add_scaled, inline="always")
def _add_scaled(wide, factor, row):
    def pairs(wide, factor, row):
        n = row.shape[0]
        firsts, seconds = wide[:n], wide[n:]
        for i in range(n):
            firsts[i] += factor * _first(row[i])
            seconds[i] += factor * _second(row[i])

    def single(wide, factor, row):
        for i in range(row.shape[0]):
            wide[i] += factor * widen(row[i])

    return pairs if row.dtype == types.uint32 else single


def add_four_scaled(wide: Any, factors: Any, row_0: Any, row_1: Any, row_2: Any, row_3: Any) -> Any:
    """wide += factors · (row_0, …, row_3), so that sums are read and written once for four rows."""
    raise NotImplementedError("runs in numba kernels only")


@overload(add_four_scaled, inline="always")
def _add_four_scaled(wide, factors, row_0, row_1, row_2, row_3):
    def pairs(wide, factors, row_0, row_1, row_2, row_3):
        n = row_0.shape[0]
        firsts, seconds = wide[:n], wide[n:]
        f_0, f_1, f_2, f_3 = factors[0], factors[1], factors[2], factors[3]
        for i in range(n):
            firsts[i] += (
                f_0 * _first(row_0[i])
                + f_1 * _first(row_1[i])
                + f_2 * _first(row_2[i])
                + f_3 * _first(row_3[i])
            )
            seconds[i] += (
                f_0 * _second(row_0[i])
                + f_1 * _second(row_1[i])
                + f_2 * _second(row_2[i])
                + f_3 * _second(row_3[i])
            )

    def single(wide, factors, row_0, row_1, row_2, row_3):
        f_0, f_1, f_2, f_3 = factors[0], factors[1], factors[2], factors[3]
        for i in range(row_0.shape[0]):
            wide[i] += (
                f_0 * widen(row_0[i])
                + f_1 * widen(row_1[i])
                + f_2 * widen(row_2[i])
                + f_3 * widen(row_3[i])
            )

    return pairs if row_0.dtype == types.uint32 else single


def add_into(row: Any, wide: Any) -> None:
    """row += wide, rounded once."""
    raise NotImplementedError("runs in numba kernels only")


@overload(add_into, inline="always")
def _add_into(row, wide):
    def pairs(row, wide):
        n = row.shape[0]
        firsts, seconds = wide[:n], wide[n:]
        for i in range(n):
            first = round_to_bf16(_first(row[i]) + firsts[i])
            second = round_to_bf16(_second(row[i]) + seconds[i])
            row[i] = np.uint32(second << _HALF) | first

    def single(row, wide):
        for i in range(row.shape[0]):
            row[i] = narrow(widen(row[i]) + wide[i], row)

    return pairs if row.dtype == types.uint32 else single


def put(row: Any, wide: Any) -> None:
    """row = wide, rounded."""
    raise NotImplementedError("runs in numba kernels only")


@overload(put, inline="always")
def _put(row, wide):
    def pairs(row, wide):
        n = row.shape[0]
        firsts, seconds = wide[:n], wide[n:]
        for i in range(n):
            first, second = round_to_bf16(firsts[i]), round_to_bf16(seconds[i])
            row[i] = np.uint32(second << _HALF) | first

    def single(row, wide):
        for i in range(row.shape[0]):
            row[i] = narrow(wide[i], row)

    return pairs if row.dtype == types.uint32 else single


@intrinsic
def ask_for(_context: Any, row: Any) -> Any:
    """Prefetch every line of a contiguous row into the second-level cache, to be read soon."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        view = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
        byte, number = ir.IntType(8), ir.IntType(32)
        start = builder.bitcast(view.data, byte.as_pointer())
        (length,) = cgutils.unpack_tuple(builder, view.shape, 1)
        num_bytes = builder.mul(length, view.itemsize)
        kind = ir.FunctionType(ir.VoidType(), [start.type, number, number, number])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [ir.Constant(number, value) for value in (0, 2, 1)]  # read, second level, data
        zero, step = (ir.Constant(length.type, value) for value in (0, _LINE_BYTES))
        with cgutils.for_range_slice(builder, zero, num_bytes, step, length.type) as (offset, _):
            builder.call(hint, [builder.gep(start, [offset]), *flags])
        return context.get_dummy_value()

    return types.void(row), codegen
