"""Products of many rows at a time in bf16 pairs: numba_panels' loops on numba_dots' instruction.

A *pair* is two neighbours along the depth, so the left factor is read as it lies, and a panel holds
a column's pairs where numba_panels holds its elements. Sums are fp32.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from punica_kernels.numba_dots import BF16_PAIRS, LANES, ROWS, BFloat, add_dots
from punica_kernels.numba_vectors import data_of, load, spread_over, vector_at

_PAIR, _INDEX = ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(ir.FloatType(), LANES)


@intrinsic(prefer_literal=True)
def multiply_pairs(
    _context: Any, c: Any, c0: Any, c_stride: Any, a: Any, a0: Any, a_stride: Any,
    b: Any, b0: Any, b_stride: Any, depth: Any, num_vectors: Any, is_added: Any
) -> Any:  # fmt: skip
    """c[r, j] (+)= Σ_k a[r, k] · b[k, j] for ROWS rows and num_vectors * LANES columns.

    a, b, c      flat; row i of each begins at its offset + i * its stride
    c            fp32
    a, b         pairs, or any memory of four-byte elements that holds them
    depth        how many pairs of k there are
    num_vectors  a literal
    is_added     a literal: whether c's own values count
    """
    signature = types.void(
        c, c0, c_stride, a, a0, a_stride, b, b0, b_stride, depth, num_vectors, is_added
    )
    if not isinstance(num_vectors, types.IntegerLiteral):
        return None
    if not isinstance(is_added, types.BooleanLiteral | types.IntegerLiteral):
        return None
    columns = range(0, num_vectors.literal_value * LANES, LANES)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        def rows(number: int, element: ir.Type, count: int) -> list[Any]:
            data = data_of(context, builder, sig.args[number], args[number], element)
            first, stride = builder.gep(data, [args[number + 1]]), args[number + 2]
            return [
                builder.gep(first, [builder.mul(stride, ir.Constant(_INDEX, row))])
                for row in range(count)
            ]

        c_rows, a_rows = rows(0, ir.FloatType(), ROWS), rows(3, _PAIR, ROWS)
        (b_ptr,) = rows(6, _PAIR, 1)
        sums = {}
        for row, place in enumerate(c_rows):
            for j in columns:
                # A variable that LLVM keeps in a register for the length of the loop.
                sums[row, j] = cgutils.alloca_once(builder, _SUMS)
                zero = ir.Constant(_SUMS, [0.0] * LANES)
                first = load(builder, place, j, LANES) if is_added.literal_value else zero
                builder.store(first, sums[row, j])
        with cgutils.for_range(builder, args[9], intp=_INDEX) as loop:
            b_row = builder.gep(b_ptr, [builder.mul(loop.index, args[8])])
            parts = {
                j: builder.bitcast(
                    builder.load(vector_at(builder, b_row, j, LANES), align=4), BF16_PAIRS
                )
                for j in columns
            }
            for row, place in enumerate(a_rows):
                factor = builder.load(builder.gep(place, [loop.index]))
                factors = builder.bitcast(spread_over(builder, factor, LANES), BF16_PAIRS)
                for j in columns:
                    total = add_dots(builder, builder.load(sums[row, j]), factors, parts[j])
                    builder.store(total, sums[row, j])
        for (row, j), total in sums.items():
            place = vector_at(builder, c_rows[row], j, LANES)
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def word_of(_context: Any, _value: Any) -> Any:
    """Return the bits of a float32 in bf16, rounded to nearest even, by the CPU's instruction.

    Denormals become zero. What numba_floats does for every CPU takes eight instructions.
    """

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], BFloat()), ir.IntType(16))

    return types.uint16(types.float32), codegen
