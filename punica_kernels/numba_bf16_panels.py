"""Products of many rows at a time in bf16 pairs: numba_panels' loops on numba_dots' instruction.

A *pair* is two neighbours along the depth, so the left factor is read as it lies, and a panel holds
a column's pairs where numba_panels holds its elements. Sums are fp32.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from punica_kernels.numba_dots import BF16_PAIRS, LANES, ROWS, BFloat, add_dots
from punica_kernels.numba_vectors import data_of, load, spread_over, vector_at

_PAIR, _INDEX = ir.IntType(32), ir.IntType(64)
_SUMS = ir.VectorType(ir.FloatType(), LANES)
_BF16 = ir.VectorType(BFloat(), LANES)
_PAIRED = [half * LANES + lane for lane in range(LANES) for half in range(2)]


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
            parts = {j: pairs_at(builder, b_row, j) for j in columns}
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
def multiply_rows(
    _context: Any, c: Any, c0: Any, c_stride: Any, a: Any, a0: Any, a_stride: Any, num_a: Any,
    b: Any, b0: Any, b_stride: Any, num_b: Any, depth: Any
) -> Any:  # fmt: skip
    """c[i, j] = Σ_k a[i, k] · b[j, k] for ROWS rows of each, which lie row after row.

    c             flat fp32; row i begins at c0 + i * c_stride
    a, b          contiguous pairs of any shape; row i begins at its offset + i * its stride
    num_a, num_b  how many rows there are; where fewer than ROWS, the last one is taken again
    depth         how many pairs of k there are, a multiple of LANES
    """
    signature = types.void(
        c, c0, c_stride, a, a0, a_stride, num_a, b, b0, b_stride, num_b, depth
    )  # fmt: skip

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        a_rows, b_rows = (
            rows_there_are(
                builder,
                data_of(context, builder, sig.args[n], args[n], _PAIR),
                args[n + 1 : n + 3],
                args[n + 3],
            )
            for n in (3, 7)
        )
        c_ptr = data_of(context, builder, sig.args[0], args[0])
        sums = [cgutils.alloca_once(builder, _SUMS) for _ in range(ROWS * ROWS)]
        for place in sums:
            builder.store(ir.Constant(_SUMS, [0.0] * LANES), place)
        step = ir.Constant(_INDEX, LANES)
        with cgutils.for_range(builder, builder.udiv(args[11], step), intp=_INDEX) as loop:
            k = builder.mul(loop.index, step)
            a_parts, b_parts = (
                [pairs_at(builder, builder.gep(row, [k]), 0) for row in rows]
                for rows in (a_rows, b_rows)
            )
            for n, place in enumerate(sums):
                a_part, b_part = a_parts[n // ROWS], b_parts[n % ROWS]
                builder.store(add_dots(builder, builder.load(place), a_part, b_part), place)
        totals = totals_of(builder, [builder.load(place) for place in sums])
        for i in range(ROWS):
            offset = builder.add(args[1], builder.mul(args[2], ir.Constant(_INDEX, i)))
            row = lanes_of(builder, totals, totals, range(i * ROWS, (i + 1) * ROWS))
            place = vector_at(builder, builder.gep(c_ptr, [offset]), 0, ROWS)
            builder.store(row, place, align=4)
        return context.get_dummy_value()

    return signature, codegen


def rows_there_are(
    builder: ir.IRBuilder, data: Any, place: Any, num_rows: Any, count: int = ROWS
) -> list[Any]:
    """Return the addresses of `count` rows; the last one there is stands in for the rest.

    `place` is the first one's offset, and a stride.
    """
    last = builder.sub(num_rows, ir.Constant(_INDEX, 1))
    numbers = [ir.Constant(_INDEX, row) for row in range(count)]
    found = [builder.select(builder.icmp_signed("<", n, last), n, last) for n in numbers]
    return [builder.gep(data, [builder.add(place[0], builder.mul(place[1], n))]) for n in found]


def widen_pairs(builder: ir.IRBuilder, pairs: Any) -> tuple[Any, Any]:
    """Return the first elements of LANES pairs, and the second ones, in fp32."""
    firsts = builder.shl(pairs, ir.Constant(pairs.type, [16] * LANES))
    seconds = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * LANES))
    return builder.bitcast(firsts, _SUMS), builder.bitcast(seconds, _SUMS)


def round_to_pairs(builder: ir.IRBuilder, firsts: Any, seconds: Any) -> Any:
    """Return LANES pairs of what is rounded to nearest even; denormals become zero."""
    words = lanes_of(
        builder, builder.fptrunc(firsts, _BF16), builder.fptrunc(seconds, _BF16), _PAIRED
    )
    return builder.bitcast(words, ir.VectorType(_PAIR, LANES))


def totals_of(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """Return the sums of LANES vectors' lanes as one vector, in their order."""
    while len(vectors) > 1:
        vectors = [
            builder.fadd(
                lanes_of(builder, a, b, range(0, 2 * LANES, 2)),
                lanes_of(builder, a, b, range(1, 2 * LANES, 2)),
            )
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def lanes_of(builder: ir.IRBuilder, a: Any, b: Any, numbers: Sequence[int]) -> Any:
    """Return some lanes of two vectors, b's counted after a's."""
    kind = ir.VectorType(ir.IntType(32), len(numbers))
    return builder.shuffle_vector(a, b, ir.Constant(kind, list(numbers)))


def pairs_at(builder: ir.IRBuilder, ptr: Any, offset: int) -> Any:
    """Return LANES pairs as add_dots takes them."""
    return builder.bitcast(
        builder.load(vector_at(builder, ptr, offset, LANES), align=4), BF16_PAIRS
    )


@intrinsic
def word_of(_context: Any, _value: Any) -> Any:
    """Return the bits of a float32 in bf16, rounded to nearest even, by the CPU's instruction.

    Denormals become zero. What numba_floats does for every CPU takes eight instructions.
    """

    def codegen(_context: Any, builder: ir.IRBuilder, _sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], BFloat()), ir.IntType(16))

    return types.uint16(types.float32), codegen
