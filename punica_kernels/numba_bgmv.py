"""Segmented LoRA of few tokens on a CPU with bf16 dot products: token by token, as BGMV does it.

What numba_lora does for any widths and formats, for modules of whole vectors in bf16 pairs: an
adapter's rows are read as they lie, and sums stay in registers (Chen et al., "Punica", 2023).
"""

from typing import Any

import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from punica_kernels.arena import ModuleSpec
from punica_kernels.numba_bf16_panels import (
    pairs_at,
    round_to_pairs,
    rows_there_are,
    totals_of,
    widen_pairs,
)
from punica_kernels.numba_both import in_parallel, serially
from punica_kernels.numba_dots import LANES, add_dots, ask_for_lines, problem
from punica_kernels.numba_vectors import data_of, fma, spread_over, vector_at

_MANY = 6  # vectors of pairs whose sums fit the registers; divides the widths of common models
_PAIR, _FLOAT, _INDEX = ir.IntType(32), ir.FloatType(), ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)


def takes(module: ModuleSpec, dtype: torch.dtype) -> bool:
    """Say whether these kernels run here, and a module's widths are whole vectors of pairs."""
    widths = (*module.slice_out_features, module.in_features)
    whole = all(width % (2 * LANES) == 0 for width in widths)
    return whole and dtype is torch.bfloat16 and problem() is None


def _add_rows(y, x, a, b, row0s, ranks, scales, column0s, segments, segment_starts, scratch):
    """Do what numba_lora.add_segments does; its arguments are the same, all rows in pairs.

    While an adapter's rows are read, those of the thread's next segment are asked for: they lie in
    pieces too short for the machine's own prefetching.
    """
    num_rows, depth, width = a.shape[1], x.shape[1], y.shape[1]
    for thread in prange(segment_starts.shape[0] - 1):
        stop = segment_starts[thread + 1]
        v = scratch[thread]
        for i in range(segment_starts[thread], stop):
            lora_index, next_index = segments[i, 2], segments[min(i + 1, stop - 1), 2]
            for s in range(a.shape[0]):
                rank, scale = ranks[s, lora_index], scales[s, lora_index]
                column_stop = column0s[s + 1] if rank > 0 else column0s[s]
                for t in range(segments[i, 0], segments[i, 0] + segments[i, 1]):
                    row0 = row0s[lora_index]
                    # Once is enough, and the next one's rank may be another: then it is a guess.
                    soon = row0s[next_index] if t == segments[i, 0] else row0
                    for r in range(0, rank, LANES):
                        first = s * num_rows + r
                        shrink_row(
                            v, r, x, t * depth, a, (first + row0) * depth, depth, rank - r,
                            (first + soon) * depth, depth,
                        )  # fmt: skip
                    for r in range(rank):
                        v[r] *= scale
                    column = column0s[s]
                    while column < column_stop:
                        y0, b0, ahead0 = (
                            t * width + column,
                            row0 * width + column,
                            soon * width + column,
                        )
                        if column + _MANY * LANES <= column_stop:
                            expand_row(y, y0, v, 0, b, b0, width, ahead0, rank, _MANY)
                            column += _MANY * LANES
                        else:
                            expand_row(y, y0, v, 0, b, b0, width, ahead0, rank, 1)
                            column += LANES


@intrinsic
def shrink_row(
    _context: Any, v: Any, v0: Any, x: Any, x0: Any, a: Any, a0: Any, a_stride: Any, num_rows: Any,
    ahead0: Any, depth: Any
) -> Any:  # fmt: skip
    """v[j] = Σ_k x[k] · a[j, k] for LANES rows of a.

    v         flat fp32, from v0 on
    x         contiguous pairs of any shape, from x0 on
    a         likewise; row j begins at a0 + j * a_stride
    num_rows  how many there are; where fewer than LANES, the last one is taken again
    ahead0    of `a`: where the rows begin that will be read soon
    depth     how many pairs of k there are, a multiple of LANES
    """
    signature = types.void(v, v0, x, x0, a, a0, a_stride, num_rows, ahead0, depth)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        def pairs(number: int) -> Any:
            return data_of(context, builder, sig.args[number], args[number], _PAIR)

        x_ptr = builder.gep(pairs(2), [args[3]])
        rows, ahead = (
            rows_there_are(builder, pairs(4), (first, args[6]), args[7], LANES)
            for first in (args[5], args[8])
        )
        sums = _zeros(builder, LANES)
        step = ir.Constant(_INDEX, LANES)
        with cgutils.for_range(builder, builder.udiv(args[9], step), intp=_INDEX) as loop:
            k = builder.mul(loop.index, step)
            part = pairs_at(builder, builder.gep(x_ptr, [k]), 0)
            for place, row, soon in zip(sums, rows, ahead, strict=True):
                ask_for_lines(builder, builder.gep(soon, [k]), 1)
                row_part = pairs_at(builder, builder.gep(row, [k]), 0)
                builder.store(add_dots(builder, builder.load(place), part, row_part), place)
        totals = totals_of(builder, [builder.load(place) for place in sums])
        v_ptr = builder.gep(data_of(context, builder, sig.args[0], args[0]), [args[1]])
        builder.store(totals, vector_at(builder, v_ptr, 0, LANES), align=4)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def expand_row(
    _context: Any, y: Any, y0: Any, v: Any, v0: Any, b: Any, b0: Any, b_stride: Any, ahead0: Any,
    depth: Any, num_vectors: Any
) -> Any:  # fmt: skip
    """y[j] = round(y[j] + Σ_r v[r] · b[r, j]) for num_vectors * LANES pairs of columns.

    y            contiguous pairs of any shape, from y0 on
    v            flat fp32, from v0 on
    b            pairs as y's; row r begins at b0 + r * b_stride
    ahead0       of `b`: where the rows begin that will be read soon
    depth        how many r there are
    num_vectors  a literal
    """
    signature = types.void(y, y0, v, v0, b, b0, b_stride, ahead0, depth, num_vectors)
    if not isinstance(num_vectors, types.IntegerLiteral):
        return None
    columns = range(0, num_vectors.literal_value * LANES, LANES)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        def at(number: int, offset: Any, element: ir.Type = _PAIR) -> Any:
            data = data_of(context, builder, sig.args[number], args[number], element)
            return builder.gep(data, [offset])

        y_ptr, v_ptr = at(0, args[1]), at(2, args[3], _FLOAT)
        b_ptr, ahead_ptr = at(4, args[5]), at(4, args[7])
        sums = {j: _zeros(builder, 2) for j in columns}
        for j, places in sums.items():
            pairs = builder.load(vector_at(builder, y_ptr, j, LANES), align=4)
            for place, half in zip(places, widen_pairs(builder, pairs), strict=True):
                builder.store(half, place)
        with cgutils.for_range(builder, args[8], intp=_INDEX) as loop:
            offset = builder.mul(loop.index, args[6])
            row = builder.gep(b_ptr, [offset])
            ask_for_lines(builder, builder.gep(ahead_ptr, [offset]), len(columns))
            factor = spread_over(builder, builder.load(builder.gep(v_ptr, [loop.index])), LANES)
            for j, places in sums.items():
                pairs = builder.load(vector_at(builder, row, j, LANES), align=4)
                for place, half in zip(places, widen_pairs(builder, pairs), strict=True):
                    builder.store(fma(builder, factor, half, builder.load(place)), place)
        for j, places in sums.items():
            pairs = round_to_pairs(builder, *(builder.load(place) for place in places))
            builder.store(pairs, vector_at(builder, y_ptr, j, LANES), align=4)
        return context.get_dummy_value()

    return signature, codegen


def _zeros(builder: ir.IRBuilder, count: int) -> list[Any]:
    """Return variables that LLVM keeps in registers for the length of a loop."""
    places = [cgutils.alloca_once(builder, _SUMS) for _ in range(count)]
    for place in places:
        builder.store(ir.Constant(_SUMS, [0.0] * LANES), place)
    return places


add_rows = in_parallel(_add_rows)
add_rows_serially = serially(_add_rows)
