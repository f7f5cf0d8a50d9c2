"""Products of bf16 pairs with sums in fp32: the inner loop that AVX512-BF16 brings.

One instruction multiplies sixteen pairs of neighbours along the depth and adds each pair's two
products to a lane (Intel, "bfloat16 Hardware Numerics Definition", 2018; AMD's Zen 4 has it, too).
Denormals count as zero.
"""

from functools import cache
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from punica_kernels.numba_vectors import data_of, spread_over

ROWS = 4  # with four vectors each, sixteen sums: enough to hide the instruction's latency
LANES = 16
PANEL_COLUMNS = 64
LINE_BYTES = 64  # of the cache
LINE_PAIRS = LINE_BYTES // 4
PIECE_LINES = 16  # that are fetched from one address on

_OLDEST_LLVM = 17  # earlier ones take the instruction's operands as integers
_WORD, _PAIR, _FLOAT, _INDEX = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.IntType(64)


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


_SUMS = ir.VectorType(_FLOAT, LANES)
_PAIRS = ir.VectorType(_PAIR, LANES)
_WORDS = ir.VectorType(_WORD, LANES)
BF16_PAIRS = ir.VectorType(BFloat(), 2 * LANES)
_BF16 = ir.VectorType(BFloat(), LANES)


@cache
def problem() -> str | None:
    """Say in words what keeps these loops from running, or from being worth it; None: nothing."""
    if binding.llvm_version_info[0] < _OLDEST_LLVM:
        return "numba's compiler is too old for bf16 dot products"
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return "numba compiles for a CPU that was named by hand"
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:
        return "this CPU's features can't be asked for"
    if not features.get("avx512bf16"):
        return "this CPU has no AVX512-BF16"
    if features.get("amx-bf16"):
        return "this CPU has AMX, which the matrix library uses"
    return None


@intrinsic(prefer_literal=True)
def multiply_panel(
    _context: Any, out: Any, out0: Any, out_stride: Any, initial: Any, column: Any, x: Any,
    x0: Any, depth: Any, num_rows: Any, panel: Any, panel0: Any, ahead0: Any, ahead_step: Any,
    pieces: Any, piece: Any, last_piece: Any, layer: Any, num_vectors: Any, num_lines: Any
) -> Any:  # fmt: skip
    """out[r, j] = round(initial[j] + Σ_k x[r, k] · panel[k, j]) for ROWS rows or fewer.

    out          flat bf16; row r begins at out0 + r * out_stride
    initial      fp32; that of j = 0 is at `column`
    x            flat pairs; row r begins at x0 + r * depth
    depth        how many pairs of k there are
    panel        flat pairs, PANEL_COLUMNS for each pair of k; the first begins at panel0
    ahead0       of `panel`: with each pair of k some lines are asked for, from here on in steps of
                 `ahead_step`, to be read soon
    pieces       [num_pieces, 2] int64 or none: the address of PIECE_LINES lines in layer 0, and the
                 bytes from one layer to the next. With num_lines 0, one line of them is asked for
                 with each pair of k, from `piece` on and never beyond `last_piece`
    num_vectors  a literal: how many times LANES columns
    num_lines    a literal: how many lines are asked for, from ahead0 on
    """
    signature = types.void(
        out, out0, out_stride, initial, column, x, x0, depth, num_rows, panel, panel0, ahead0,
        ahead_step, pieces, piece, last_piece, layer, num_vectors, num_lines,
    )  # fmt: skip
    if not all(isinstance(one, types.IntegerLiteral) for one in (num_vectors, num_lines)):
        return None
    columns = range(0, num_vectors.literal_value * LANES, LANES)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        def at(number: int, element: ir.Type, offset: Any) -> Any:
            return builder.gep(
                data_of(context, builder, sig.args[number], args[number], element), [offset]
            )

        def rows(number: int, element: ir.Type, first: Any, stride: Any) -> list[Any]:
            # Where there are fewer, the last one stands in for the rest: it is computed again,
            # and written again to the same place.
            last = builder.sub(args[8], ir.Constant(_INDEX, 1))
            numbers = [ir.Constant(_INDEX, row) for row in range(ROWS)]
            found = [builder.select(builder.icmp_signed("<", n, last), n, last) for n in numbers]
            return [
                at(number, element, builder.add(first, builder.mul(stride, row))) for row in found
            ]

        x_rows, out_rows = rows(5, _PAIR, args[6], args[7]), rows(0, _WORD, args[1], args[2])
        panel_ptr, ahead_ptr = at(9, _PAIR, args[10]), at(9, _PAIR, args[11])
        first_sums = at(3, _FLOAT, args[4])
        sums = {}
        for row in range(ROWS):
            for j in columns:
                # A variable that LLVM keeps in a register for the length of the loop.
                sums[row, j] = cgutils.alloca_once(builder, _SUMS)
                builder.store(builder.load(_vector(builder, first_sums, j, _SUMS)), sums[row, j])
        with cgutils.for_range(builder, args[7], intp=_INDEX) as loop:
            offset = builder.mul(loop.index, ir.Constant(_INDEX, PANEL_COLUMNS))
            weights = builder.gep(panel_ptr, [offset])
            ahead = builder.gep(ahead_ptr, [builder.mul(loop.index, args[12])])
            ask_for_lines(builder, ahead, num_lines.literal_value)
            if num_lines.literal_value == 0:
                piece_ptr = data_of(context, builder, sig.args[13], args[13], _INDEX)
                line = _line_of_piece(builder, piece_ptr, args[14:17], loop.index)
                ask_for_lines(builder, line, 1)
            parts = {
                j: builder.bitcast(
                    builder.load(_vector(builder, weights, j, _PAIRS), align=4), BF16_PAIRS
                )
                for j in columns
            }
            for row, place in enumerate(x_rows):
                pair = builder.load(builder.gep(place, [loop.index]))
                pairs = builder.bitcast(spread_over(builder, pair, LANES), BF16_PAIRS)
                for j in columns:
                    total = add_dots(builder, builder.load(sums[row, j]), pairs, parts[j])
                    builder.store(total, sums[row, j])
        for (row, j), total in sums.items():
            rounded = _round(builder, builder.load(total))
            builder.store(rounded, _vector(builder, out_rows[row], j, _WORDS), align=2)
        return context.get_dummy_value()

    return signature, codegen


def _vector(builder: ir.IRBuilder, ptr: Any, offset: int, kind: ir.Type) -> Any:
    """Return the address of some elements as one vector's."""
    place = builder.gep(ptr, [ir.Constant(_INDEX, offset)])
    return builder.bitcast(place, kind.as_pointer())


def add_dots(builder: ir.IRBuilder, sums: Any, a: Any, b: Any) -> Any:
    """Return sums + the dot products of the pairs of a and b."""
    kind = ir.FunctionType(_SUMS, [_SUMS, BF16_PAIRS, BF16_PAIRS])
    dots = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(dots, [sums, a, b])


def _round(builder: ir.IRBuilder, values: Any) -> Any:
    """Return fp32 as words of bf16, to nearest even."""
    kind = ir.FunctionType(_BF16, [_SUMS])
    rounded = cgutils.get_or_insert_function(
        builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512"
    )
    return builder.bitcast(builder.call(rounded, [values]), _WORDS)


def ask_for_lines(builder: ir.IRBuilder, ptr: Any, num_lines: int) -> None:
    """Prefetch some lines into the second-level cache."""
    byte, number = ir.IntType(8), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), number, number, number])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(number, value) for value in (0, 2, 1)]  # to read, second level, data
    for line in range(num_lines):
        place = builder.gep(ptr, [ir.Constant(_INDEX, line * LINE_PAIRS)])
        builder.call(hint, [builder.bitcast(place, byte.as_pointer()), *flags])


def _line_of_piece(builder: ir.IRBuilder, pieces: Any, place: Any, k: Any) -> Any:
    """Return the address of line k, counted from a piece on; `place` is multiply_panel's."""
    piece, last_piece, layer = place
    lines = ir.Constant(_INDEX, PIECE_LINES)
    number = builder.add(piece, builder.udiv(k, lines))
    number = builder.select(builder.icmp_signed("<", number, last_piece), number, last_piece)
    row = builder.gep(pieces, [builder.mul(number, ir.Constant(_INDEX, 2))])
    per_layer = builder.load(builder.gep(row, [ir.Constant(_INDEX, 1)]))
    offset = builder.mul(builder.urem(k, lines), ir.Constant(_INDEX, LINE_BYTES))
    address = builder.add(builder.load(row), builder.add(builder.mul(layer, per_layer), offset))
    return builder.inttoptr(address, _PAIR.as_pointer())
