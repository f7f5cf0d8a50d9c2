"""The expand of long segments in bf16 pairs: rows of b are widened in registers, never copied."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from punica_kernels.numba_bf16_panels import round_to_pairs, rows_there_are, widen_pairs
from punica_kernels.numba_dots import LANES
from punica_kernels.numba_vectors import data_of, fma, spread_over, vector_at

_PAIR, _FLOAT, _INDEX = ir.IntType(32), ir.FloatType(), ir.IntType(64)


@intrinsic(prefer_literal=True)
def add_expanded(
    _context: Any, y: Any, y0: Any, y_stride: Any, v: Any, v0: Any, v_stride: Any, num_rows: Any,
    b: Any, b0: Any, b_stride: Any, depth: Any, num_vectors: Any
) -> Any:  # fmt: skip
    """y[r, j] += Σ_k v[r, k] · b[k, j] for four rows and num_vectors * LANES pairs, rounded once.

    y, b         contiguous pairs of any shape; row i begins at its offset + i * its stride
    v            flat fp32; row r begins at v0 + r * v_stride
    num_rows     how many there are; where fewer than four, the last one is taken again
    depth        how many k there are
    num_vectors  a literal
    """
    signature = types.void(
        y, y0, y_stride, v, v0, v_stride, num_rows, b, b0, b_stride, depth, num_vectors
    )
    if not isinstance(num_vectors, types.IntegerLiteral):
        return None
    columns = range(0, num_vectors.literal_value * LANES, LANES)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        y_rows, v_rows = (
            rows_there_are(
                builder,
                data_of(context, builder, sig.args[n], args[n], kind),
                args[n + 1 : n + 3],
                args[6],
            )
            for n, kind in ((0, _PAIR), (3, _FLOAT))
        )
        b_ptr = builder.gep(data_of(context, builder, sig.args[7], args[7], _PAIR), [args[8]])
        sums = {}
        for row, place in enumerate(y_rows):
            for j in columns:
                pairs = builder.load(vector_at(builder, place, j, LANES), align=4)
                for half, wide in enumerate(widen_pairs(builder, pairs)):
                    # A variable that LLVM keeps in a register for the length of the loop.
                    sums[row, j, half] = cgutils.alloca_once(builder, wide.type)
                    builder.store(wide, sums[row, j, half])
        with cgutils.for_range(builder, args[10], intp=_INDEX) as loop:
            b_row = builder.gep(b_ptr, [builder.mul(loop.index, args[9])])
            parts = {
                (j, half): wide
                for j in columns
                for half, wide in enumerate(
                    widen_pairs(builder, builder.load(vector_at(builder, b_row, j, LANES), align=4))
                )
            }
            for row, place in enumerate(v_rows):
                factor = builder.load(builder.gep(place, [loop.index]))
                factors = spread_over(builder, factor, LANES)
                for (j, half), part in parts.items():
                    total = fma(builder, factors, part, builder.load(sums[row, j, half]))
                    builder.store(total, sums[row, j, half])
        for row, place in enumerate(y_rows):
            for j in columns:
                halves = (builder.load(sums[row, j, half]) for half in range(2))
                pairs = round_to_pairs(builder, *halves)
                builder.store(pairs, vector_at(builder, place, j, LANES), align=4)
        return context.get_dummy_value()

    return signature, codegen
