"""Products of bf16 pairs with sums in fp32: the inner loop that AVX512-BF16 brings.

One instruction multiplies sixteen pairs of neighbours along the depth and adds each pair's two
products to a lane (Intel, "bfloat16 Hardware Numerics Definition", 2018; AMD's Zen 4 has it, too).
Denormals count as zero.
"""

from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from punica_kernels.numba_vectors import data_of, spread_over, sum_of

ROWS = 4  # with four vectors each, sixteen sums: enough to hide the instruction's latency
LANES = 16
PANEL_COLUMNS = 64
LINE_PAIRS = 16  # of a cache line

_CHAINS = 4  # sums of a single dot product that don't wait for each other
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
    num_vectors: Any, num_lines: Any
) -> Any:  # fmt: skip
    """out[r, j] = round(initial[j] + Σ_k x[r, k] · panel[k, j]) for ROWS rows or fewer.

    out          flat bf16; row r begins at out0 + r * out_stride
    initial      fp32; that of j = 0 is at `column`
    x            flat pairs; row r begins at x0 + r * depth
    depth        how many pairs of k there are
    panel        flat pairs, PANEL_COLUMNS for each pair of k; the first begins at panel0
    ahead0       of `panel`: with each pair of k some lines are asked for, from here on in steps of
                 `ahead_step`, to be read soon
    num_vectors  a literal: how many times LANES columns
    num_lines    a literal: how many lines are asked for
    """
    signature = types.void(
        out, out0, out_stride, initial, column, x, x0, depth, num_rows, panel, panel0, ahead0,
        ahead_step, num_vectors, num_lines,
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
            _ask_for(builder, ahead, num_lines.literal_value)
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


def _ask_for(builder: ir.IRBuilder, ptr: Any, num_lines: int) -> None:
    """Prefetch some lines into the second-level cache."""
    byte, number = ir.IntType(8), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), number, number, number])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(number, value) for value in (0, 2, 1)]  # to read, second level, data
    for line in range(num_lines):
        place = builder.gep(ptr, [ir.Constant(_INDEX, line * LINE_PAIRS)])
        builder.call(hint, [builder.bitcast(place, byte.as_pointer()), *flags])


@intrinsic
def dot_rows(_context: Any, x: Any, a: Any) -> Any:
    """x · a for two contiguous rows of pairs, as many as a multiple of LANES."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        x_row, a_row = (
            data_of(context, builder, kind, row, _PAIR)
            for kind, row in zip(sig.args, args, strict=True)
        )
        view = cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0])
        (length,) = cgutils.unpack_tuple(builder, view.shape, 1)
        sums = [cgutils.alloca_once(builder, _SUMS) for _ in range(_CHAINS)]
        for one in sums:
            builder.store(ir.Constant(_SUMS, [0.0] * LANES), one)

        def add(place: Any, chain: int) -> None:
            x_part, a_part = (
                builder.bitcast(
                    builder.load(
                        _vector(builder, builder.gep(row, [place]), chain * LANES, _PAIRS), align=4
                    ),
                    BF16_PAIRS,
                )
                for row in (x_row, a_row)
            )
            total = add_dots(builder, builder.load(sums[chain]), x_part, a_part)
            builder.store(total, sums[chain])

        stride = ir.Constant(_INDEX, _CHAINS * LANES)
        whole = builder.mul(builder.sdiv(length, stride), stride)
        with cgutils.for_range_slice(builder, ir.Constant(_INDEX, 0), whole, stride, _INDEX) as (
            place,
            _,
        ):
            for chain in range(_CHAINS):
                add(place, chain)
        with cgutils.for_range_slice(
            builder, whole, length, ir.Constant(_INDEX, LANES), _INDEX
        ) as (place, _):
            add(place, 0)
        total = builder.load(sums[0])
        for one in sums[1:]:
            total = builder.fadd(total, builder.load(one))
        return sum_of(builder, total)

    return types.float32(x, a), codegen
