"""Every kernel with every choice of tiles, on the shapes of Llamas of 1B and 8B."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from punica_kernels.arena import Arena, ModuleSpec, Span
from punica_kernels.attention_tiles import PagedPlan, QueryTiles
from punica_kernels.device_plan import DevicePlan, DeviceTables, build_device_plan
from punica_kernels.fused_layers import add_rms_norm, rms_norm, rotate, silu_mul
from punica_kernels.paged_attention import paged_attention
from punica_kernels.plan import LoraPlan, Segment
from punica_kernels.store_kv import store_kv
from punica_kernels.triton_bgmv import row_expand, row_shrink
from punica_kernels.triton_expand import expand
from punica_kernels.triton_shrink import shrink
from punica_kernels.triton_tiles import (
    LONG_LORA,
    ROW_LORA,
    SHORT_LORA,
    Family,
    decode_tiles,
    num_feature_splits,
    prefill_tiles,
)
from tests.punica_kernels.aot import Launch, launches_of

META = torch.device("meta")
MAX_RANK = 64
NUM_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The extents of a model."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int


SHAPES = (
    Shape(name="1B", hidden=2048, num_heads=32, num_kv_heads=8, head_dim=64, intermediate=8192),
    Shape(name="8B", hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate=14336),
)


def all_launches(family: Family, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    small, large = SHAPES
    return [
        *lora_launches(small, family, dtype, module="qkv"),
        *lora_launches(large, family, dtype, module="down"),
        *attention_launches(small, family, dtype, splits=(1,)),
        *attention_launches(large, family, dtype, splits=(1, 8)),
        *attention_launches(replace(large, name="8B fp32"), family, torch.float32, splits=(1,)),
        *layer_launches(small, dtype),
        *layer_launches(large, dtype),
    ]


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def lora_launches(shape: Shape, family: Family, dtype: torch.dtype, *, module: str) -> list[Launch]:
    kv_features = shape.num_kv_heads * shape.head_dim
    in_features, slices = {
        "qkv": (shape.hidden, (shape.hidden, kv_features, kv_features)),
        "down": (shape.intermediate, (shape.hidden,)),
    }[module]
    spec = ModuleSpec(name=module, group="all", in_features=in_features, slice_out_features=slices)
    arena = Arena(modules=[spec], num_layers=1, num_rows={"all": 128}, dtype=dtype, device=META)
    ranks = {module: [[MAX_RANK] * len(slices)]}
    arena.set_adapter(0, spans={"all": Span(row0=0, num_rows=MAX_RANK)}, ranks=ranks, scales=ranks)
    tables = DeviceTables(arena)
    x, y = (empty(NUM_TOKENS, width, dtype=dtype) for width in (in_features, sum(slices)))
    a, b, of = arena.a(module)[0], arena.b(module)[0], tables.of(module, 0)

    def name(kind: str, num_splits: int) -> str:
        return f"{shape.name} {module} {kind}, {num_splits} splits"

    def rank_space(max_splits: int) -> Tensor:
        num_splits = num_feature_splits(in_features, max_splits)
        return empty(num_splits, len(slices), NUM_TOKENS, MAX_RANK, dtype=torch.float32)

    rows = ROW_LORA[family]
    v, plan = rank_space(rows.max_splits), plan_of(1, tables, block_m=16)
    found = launches_of(
        name("rows", v.shape[0]),
        partial(row_shrink, x, v, a=a, tables=of, plan=plan, tiles=rows),
        partial(row_expand, v, y, b=b, tables=of, plan=plan, tiles=rows),
    )
    for kind, tiles in (("short", SHORT_LORA[family]), ("long", LONG_LORA[family])):
        v = rank_space(tiles.max_splits)
        plan = plan_of(NUM_TOKENS, tables, block_m=tiles.block_m)
        found += launches_of(
            name(kind, v.shape[0]),
            partial(shrink, x, v, a=a, tables=of, plan=plan, tiles=tiles),
            partial(expand, v, y, b=b, tables=of, plan=plan, tiles=tiles),
        )
    return found


def plan_of(length: int, tables: DeviceTables, *, block_m: int) -> DevicePlan:
    segment = Segment(start=0, num_tokens=length, lora_index=0)
    plan = LoraPlan(segments=(segment,), num_tokens=NUM_TOKENS)
    return build_device_plan(plan, tables=tables, block_m=block_m)


def attention_launches(
    shape: Shape, family: Family, dtype: torch.dtype, *, splits: tuple[int, ...]
) -> list[Launch]:
    group = shape.num_heads // shape.num_kv_heads
    q = empty(NUM_TOKENS, shape.num_heads, shape.head_dim, dtype=dtype)
    cells = empty(256, 16, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    found = []
    for kind, tiles in (
        ("decode", decode_tiles(family, dtype)),
        ("prefill", prefill_tiles(family, dtype)),
    ):
        for num_splits in splits:
            launch = QueryTiles(
                lines=empty(NUM_TOKENS, 4, dtype=torch.int32),
                block_q=1 if kind == "decode" else tiles.block_m // group,
                num_splits=num_splits,
                tiles=tiles,
            )
            plan = PagedPlan(
                launches=(launch,), block_tables=empty(NUM_TOKENS, 256, dtype=torch.int32)
            )
            found += launches_of(
                f"{shape.name} {kind}, {num_splits} splits",
                partial(paged_attention, q, q, k=cells, v=cells, plan=plan, scale=0.1),
            )
    return found


def layer_launches(shape: Shape, dtype: torch.dtype) -> list[Launch]:
    x, weight = empty(NUM_TOKENS, shape.hidden, dtype=dtype), empty(shape.hidden, dtype=dtype)
    heads = empty(NUM_TOKENS, shape.num_heads, shape.head_dim, dtype=dtype)
    angles = empty(NUM_TOKENS, shape.head_dim, dtype=dtype)
    gate_up = empty(NUM_TOKENS, 2 * shape.intermediate, dtype=dtype)
    k = empty(NUM_TOKENS, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    cells = empty(256, 16, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    slots = empty(NUM_TOKENS, dtype=torch.int64)
    return [
        *launches_of(shape.name, partial(rms_norm, x, weight, 1e-5)),
        *launches_of(f"{shape.name} + residual", partial(add_rms_norm, x, x, weight, 1e-5)),
        *launches_of(shape.name, partial(rotate, heads, angles, angles)),
        *launches_of(shape.name, partial(silu_mul, gate_up)),
        *launches_of(
            shape.name, partial(store_kv, k, k, k_cells=cells, v_cells=cells, kv_slots=slots)
        ),
    ]
