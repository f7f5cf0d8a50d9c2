"""Products of many rows at a time: the inner loop of long chunks, of attention and of LoRA.

The right factor lies in *panels*, PANEL_COLUMNS columns wide and row after row, so that a few sums
per row of the left factor stay in registers for the whole depth (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008). All is fp32.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from punica_kernels.numba_vectors import data_of, fma, load, spread_over, sum_of, vector_at


def _has_wide_vectors() -> bool:
    """Say whether a register holds sixteen fp32; False where the host can't be asked."""
    try:
        return bool(binding.get_host_cpu_features().get("avx512f"))
    except RuntimeError:
        return False


# Sums of six rows and two vectors fill the registers of every family: 12 of 32 with AVX-512, 12 of
# 16 with AVX2, 24 of 32 with NEON.
ROWS = 6
PANEL_COLUMNS = 32 if _has_wide_vectors() else 16
_WIDTH = 16
# Of multiply_turned: sixteen sums beside four vectors of each factor fill AVX-512's registers;
# elsewhere some spill.
TURNED_ROWS = 4
TURNED_DEPTH = _WIDTH
_INDEX = ir.IntType(64)


@intrinsic(prefer_literal=True)
def multiply(
    _context: Any, c: Any, c0: Any, c_stride: Any, a: Any, a0: Any, a_stride: Any,
    b: Any, b0: Any, b_stride: Any, depth: Any, is_added: Any
) -> Any:  # fmt: skip
    """c[r, j] (+)= Σ_k a[r, k] · b[k, j] for ROWS rows and PANEL_COLUMNS columns.

    a, b, c   flat fp32; row i of each begins at its offset + i * its stride
    depth     how many k there are
    is_added  a literal: whether c's own values count
    """
    signature = types.void(c, c0, c_stride, a, a0, a_stride, b, b0, b_stride, depth, is_added)
    if not isinstance(is_added, types.BooleanLiteral | types.IntegerLiteral):
        return None
    columns = range(0, PANEL_COLUMNS, _WIDTH)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        c_rows, a_rows, (b_ptr,) = (
            _rows(
                builder, data_of(context, builder, sig.args[n], args[n]), args[n + 1 : n + 3], count
            )
            for n, count in ((0, ROWS), (3, ROWS), (6, 1))
        )
        sums = {}
        for row, place in enumerate(c_rows):
            for j in columns:
                # A variable that LLVM keeps in a register for the length of the loop.
                kind = ir.VectorType(ir.FloatType(), _WIDTH)
                sums[row, j] = cgutils.alloca_once(builder, kind)
                zero = ir.Constant(kind, [0.0] * _WIDTH)
                first = load(builder, place, j, _WIDTH) if is_added.literal_value else zero
                builder.store(first, sums[row, j])
        with cgutils.for_range(builder, args[9], intp=_INDEX) as loop:
            b_row = builder.gep(b_ptr, [builder.mul(loop.index, args[8])])
            parts = {j: load(builder, b_row, j, _WIDTH) for j in columns}
            for row, place in enumerate(a_rows):
                factor = builder.load(builder.gep(place, [loop.index]))
                factors = spread_over(builder, factor, _WIDTH)
                for j in columns:
                    total = fma(builder, factors, parts[j], builder.load(sums[row, j]))
                    builder.store(total, sums[row, j])
        for (row, j), total in sums.items():
            place = vector_at(builder, c_rows[row], j, _WIDTH)
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def multiply_turned(
    _context: Any, c: Any, c0: Any, c_stride: Any, a: Any, a0: Any, a_stride: Any,
    b: Any, b0: Any, b_stride: Any, depth: Any
) -> Any:  # fmt: skip
    """c[i, j] = Σ_k a[i, k] · b[j, k] for TURNED_ROWS rows of each.

    a, b, c  flat fp32; row i of each begins at its offset + i * its stride
    depth    how many k there are, a multiple of TURNED_DEPTH

    No panel is needed where both factors lie row after row; sums are put together at the end.
    """
    signature = types.void(c, c0, c_stride, a, a0, a_stride, b, b0, b_stride, depth)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        c_rows, a_rows, b_rows = (
            _rows(
                builder,
                data_of(context, builder, sig.args[n], args[n]),
                args[n + 1 : n + 3],
                TURNED_ROWS,
            )
            for n in (0, 3, 6)
        )
        kind = ir.VectorType(ir.FloatType(), _WIDTH)
        sums = {}
        for i in range(TURNED_ROWS):
            for j in range(TURNED_ROWS):
                sums[i, j] = cgutils.alloca_once(builder, kind)
                builder.store(ir.Constant(kind, [0.0] * _WIDTH), sums[i, j])
        step = ir.Constant(_INDEX, _WIDTH)
        with cgutils.for_range(builder, builder.udiv(args[9], step), intp=_INDEX) as loop:
            k = builder.mul(loop.index, step)
            a_parts, b_parts = (
                [load(builder, builder.gep(row, [k]), 0, _WIDTH) for row in rows]
                for rows in (a_rows, b_rows)
            )
            for (i, j), place in sums.items():
                builder.store(fma(builder, a_parts[i], b_parts[j], builder.load(place)), place)
        for (i, j), place in sums.items():
            total = sum_of(builder, builder.load(place))
            builder.store(total, builder.gep(c_rows[i], [ir.Constant(_INDEX, j)]))
        return context.get_dummy_value()

    return signature, codegen


def _rows(builder: ir.IRBuilder, ptr: Any, place: Any, num_rows: int) -> list[Any]:
    """Return the addresses of consecutive rows; `place` is the first one's offset, and a stride."""
    first, stride = builder.gep(ptr, [place[0]]), place[1]
    return [
        builder.gep(first, [builder.mul(stride, ir.Constant(_INDEX, row))])
        for row in range(num_rows)
    ]
