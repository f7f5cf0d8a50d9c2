"""The two inner loops of attention as vector code: one row of K or V is widened once and used by
every query head that shares it, with sums kept in registers.

Plain loops leave this to the vectoriser, which widens each row once per head. Extents that are
compile-time constants arrive as literals; LLVM makes of the vectors what the machine has.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FAST = ("reassoc", "contract", "nsz")
_LINE_BYTES = 64
_MAX_SUMS = 16  # vectors of running sums that fit the registers beside what is being read
_FLOAT, _WORD, _INDEX = ir.FloatType(), ir.IntType(16), ir.IntType(64)


@intrinsic(prefer_literal=True)
def score_keys(
    _context: Any, work: Any, q0: Any, k: Any, k0: Any, k_stride: Any, num_keys: Any, s0: Any,
    s_stride: Any, ahead: Any, ahead0: Any, group: Any, head_dim: Any
) -> Any:  # fmt: skip
    """work[s0 + g * s_stride + j] = q[g] · k[j], the dot products of a group with its keys.

    work  flat fp32; q is [group, head_dim] at q0
    k     flat, fp32 or bf16; key j begins at k0 + j * k_stride

    While key j is read, ahead[ahead0 + j * k_stride …] is asked for: blocks lie anywhere, and the
    machine's own prefetching has no time to learn a block's direction.
    """
    extents = _literals(group, head_dim)
    signature = types.void(
        work, q0, k, k0, k_stride, num_keys, s0, s_stride, ahead, ahead0, group, head_dim
    )
    if extents is None:
        return None
    num_heads, dim = extents
    width = _vector_width(dim)
    is_bf16 = k.dtype == types.uint16

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        work_ptr = data_of(context, builder, sig.args[0], args[0], _FLOAT)
        q_ptr, s_ptr = builder.gep(work_ptr, [args[1]]), builder.gep(work_ptr, [args[6]])
        k_type = _WORD if is_bf16 else _FLOAT
        k_ptr = builder.gep(data_of(context, builder, sig.args[2], args[2], k_type), [args[3]])
        ahead_ptr = builder.gep(data_of(context, builder, sig.args[8], args[8], k_type), [args[9]])
        queries = [
            [load(builder, q_ptr, g * dim + c, width) for c in range(0, dim, width)]
            for g in range(num_heads)
        ]
        with cgutils.for_range(builder, args[5], intp=_INDEX) as loop:
            offset = builder.mul(loop.index, args[4])
            row = builder.gep(k_ptr, [offset])
            _ask_for(builder, builder.gep(ahead_ptr, [offset]), dim)
            key = [load(builder, row, c, width, widen=is_bf16) for c in range(0, dim, width)]
            for g in range(num_heads):
                total = builder.fmul(queries[g][0], key[0], flags=_FAST)
                for q_part, k_part in zip(queries[g][1:], key[1:], strict=True):
                    total = fma(builder, q_part, k_part, total)
                place = builder.add(loop.index, builder.mul(args[7], ir.Constant(_INDEX, g)))
                builder.store(sum_of(builder, total), builder.gep(s_ptr, [place]))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def add_values(
    _context: Any, work: Any, p0: Any, p_stride: Any, v: Any, v0: Any, v_stride: Any,
    num_keys: Any, sums0: Any, ahead: Any, ahead0: Any, group: Any, head_dim: Any
) -> Any:  # fmt: skip
    """work[sums0 + g * head_dim + d] += Σ_j work[p0 + g * p_stride + j] · v[j, d].

    work  flat fp32
    v     flat, fp32 or bf16; the value of key j begins at v0 + j * v_stride

    ahead is asked for as in score_keys.
    """
    extents = _literals(group, head_dim)
    signature = types.void(
        work, p0, p_stride, v, v0, v_stride, num_keys, sums0, ahead, ahead0, group, head_dim
    )
    if extents is None:
        return None
    num_heads, dim = extents
    width = _vector_width(dim)
    is_bf16 = v.dtype == types.uint16
    parts_at_once = max(1, min(dim // width, _MAX_SUMS // num_heads))

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> Any:
        work_ptr = data_of(context, builder, sig.args[0], args[0], _FLOAT)
        p_ptr, a_ptr = builder.gep(work_ptr, [args[1]]), builder.gep(work_ptr, [args[7]])
        v_type = _WORD if is_bf16 else _FLOAT
        v_ptr = builder.gep(data_of(context, builder, sig.args[3], args[3], v_type), [args[4]])
        ahead_ptr = builder.gep(data_of(context, builder, sig.args[8], args[8], v_type), [args[9]])
        columns = range(0, dim, width)
        for first in range(0, len(columns), parts_at_once):
            some = columns[first : first + parts_at_once]
            sums = {}
            for g in range(num_heads):
                for c in some:
                    # A variable that LLVM keeps in a register for the length of the loop.
                    sums[g, c] = cgutils.alloca_once(builder, ir.VectorType(_FLOAT, width))
                    builder.store(load(builder, a_ptr, g * dim + c, width), sums[g, c])
            with cgutils.for_range(builder, args[6], intp=_INDEX) as loop:
                offset = builder.mul(loop.index, args[5])
                row = builder.gep(v_ptr, [offset])
                if first == 0:
                    _ask_for(builder, builder.gep(ahead_ptr, [offset]), dim)
                value = {c: load(builder, row, c, width, widen=is_bf16) for c in some}
                for g in range(num_heads):
                    place = builder.add(loop.index, builder.mul(args[2], ir.Constant(_INDEX, g)))
                    weight = spread_over(builder, builder.load(builder.gep(p_ptr, [place])), width)
                    for c in some:
                        total = fma(builder, weight, value[c], builder.load(sums[g, c]))
                        builder.store(total, sums[g, c])
            for (g, c), total in sums.items():
                builder.store(
                    builder.load(total), vector_at(builder, a_ptr, g * dim + c, width), align=4
                )
        return context.get_dummy_value()

    return signature, codegen


def _ask_for(builder: ir.IRBuilder, ptr: Any, num_elements: int) -> None:
    """Prefetch every line of some elements, to be read once."""
    num_bytes = num_elements * (2 if ptr.type.pointee == _WORD else 4)
    byte = ir.IntType(8)
    first = builder.bitcast(ptr, byte.as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [first.type, number, number, number])
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(number, value) for value in (0, 2, 1)]  # to read, second level, data
    for offset in range(0, num_bytes, _LINE_BYTES):
        builder.call(hint, [builder.gep(first, [ir.Constant(_INDEX, offset)]), *flags])


def _literals(group: Any, head_dim: Any) -> tuple[int, int] | None:
    if not isinstance(group, types.IntegerLiteral) or not isinstance(
        head_dim, types.IntegerLiteral
    ):
        return None
    return group.literal_value, head_dim.literal_value


def _vector_width(dim: int) -> int:
    """Return how many elements a vector takes: 16 where heads are wide enough, else fewer."""
    width = 16
    while dim % width:
        width //= 2
    return width


def data_of(
    context: Any, builder: ir.IRBuilder, kind: Any, array: Any, element: ir.Type = _FLOAT
) -> Any:
    """Return the address of an array's first element."""
    data = cgutils.create_struct_proxy(kind)(context, builder, array).data
    return builder.bitcast(data, element.as_pointer())


def vector_at(builder: ir.IRBuilder, ptr: Any, offset: int, width: int) -> Any:
    """Return the address of `width` elements as one vector's."""
    element = ptr.type.pointee
    place = builder.gep(ptr, [ir.Constant(_INDEX, offset)])
    return builder.bitcast(place, ir.VectorType(element, width).as_pointer())


def load(builder: ir.IRBuilder, ptr: Any, offset: int, width: int, *, widen: bool = False) -> Any:
    """Return `width` elements as fp32."""
    if not widen:
        return builder.load(vector_at(builder, ptr, offset, width), align=4)
    words = builder.load(vector_at(builder, ptr, offset, width), align=2)
    wide_type = ir.VectorType(ir.IntType(32), width)
    bits = builder.shl(builder.zext(words, wide_type), ir.Constant(wide_type, [16] * width))
    return builder.bitcast(bits, ir.VectorType(_FLOAT, width))


def fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """Return a·b + c; `contract` lets LLVM fuse the two."""
    return builder.fadd(builder.fmul(a, b, flags=_FAST), c, flags=_FAST)


def sum_of(builder: ir.IRBuilder, vector: Any) -> Any:
    """Return the sum of a vector's elements, in any order."""
    name = f"llvm.vector.reduce.fadd.v{vector.type.count}f32"
    kind = ir.FunctionType(_FLOAT, [_FLOAT, vector.type])
    reduce = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(reduce, [ir.Constant(_FLOAT, 0.0), vector], fastmath=_FAST)


def spread_over(builder: ir.IRBuilder, value: Any, width: int) -> Any:
    """Return a vector of `width` equal elements."""
    kind = ir.VectorType(value.type, width)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INDEX, 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)
