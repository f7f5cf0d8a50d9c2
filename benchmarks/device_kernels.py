"""How fast each kernel is, against the bytes that it must move at least."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.device_world import BLOCK_SIZE, Shape, World, kv_storage, random_arena, step_inputs
from punica_kernels.arena import Arena
from punica_kernels.attention_tiles import plan_attention
from punica_kernels.device_plan import DevicePlan, DeviceTables, build_device_plan
from punica_kernels.paged_attention import paged_attention
from punica_kernels.plan import build_plan
from punica_kernels.triton_bgmv import row_expand, row_shrink
from punica_kernels.triton_expand import expand
from punica_kernels.triton_shrink import shrink
from punica_kernels.triton_tiles import (
    ROW_LORA,
    LoraTiles,
    RowTiles,
    family_of,
    lora_tiles,
    next_power_of_2,
    num_feature_splits,
)

_RANK = 16
_NUM_LAYERS = 8  # so many that a cache doesn't hold all of them at once
# (adapters, rows of each)
_BATCHES = {
    "64 rows, 64 adapters": (64, 1),
    "64 rows, 8 adapters": (8, 8),
    "a prompt of 1024": (1, 1024),
}
_CONTEXTS = {
    "64 decodes at 1024": [(1, 1024)] * 64,
    "1 decode at 8192": [(1, 8192)],
    "a prompt of 1024": [(1024, 1024)],
}


def copy_bandwidth(world: World) -> float:
    """Return bytes a second, read and written, of a copy within the device."""
    size = 1024 if world.dry else 1 << 30
    source = torch.zeros(size, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    return 2 * size / world.seconds(lambda: target.copy_(source))


def kernel_figures(world: World) -> list[dict[str, object]]:
    """Return a line for each kernel and batch: microseconds a layer, bytes, bytes a second."""
    results = []
    for shape in world.shapes:
        for name, (num_adapters, num_rows) in _BATCHES.items():
            counts = (
                (min(num_adapters, 3), min(num_rows, 20)) if world.dry else (num_adapters, num_rows)
            )
            results += _lora(world, shape, name, *counts)
        results += _attention(world, shape)
    return results


def _line(
    world: World, what: str, calls: list[Callable[[], object]], num_bytes: int
) -> dict[str, object]:
    seconds = world.seconds(lambda: [call() for call in calls]) / len(calls)
    return {
        "kernel": what,
        "microseconds": seconds * 1e6,
        "bytes": num_bytes,
        "bytes_per_s": num_bytes / seconds,
    }


def _lora(
    world: World, shape: Shape, name: str, num_adapters: int, num_rows: int
) -> list[dict[str, object]]:
    num_layers = 1 if world.dry else _NUM_LAYERS
    arena = random_arena(world, shape, [_RANK] * num_adapters, num_layers=num_layers)
    runs = build_plan(list(range(num_adapters)), [num_rows] * num_adapters)
    assert runs is not None
    family, tables = family_of(world.device), DeviceTables(arena)
    is_rows = num_rows == 1
    tiles: LoraTiles | RowTiles = (
        ROW_LORA[family] if is_rows else lora_tiles(family, longest_segment=num_rows)
    )
    block_m = 16 if isinstance(tiles, RowTiles) else tiles.block_m
    plan = build_device_plan(runs, tables=tables, block_m=block_m)
    down, up = (row_shrink, row_expand) if is_rows else (shrink, expand)
    kind = "bgmv " if is_rows else ""
    results = []
    for module in arena.modules:
        x, y = (world.randn(plan.num_tokens, n) for n in (module.in_features, module.out_features))
        v = _rank_space(x, arena, module.name, plan, tiles)
        item, rows, slices = x.element_size(), plan.num_tokens, module.num_slices
        weights = num_adapters * _RANK * item
        v_bytes = rows * slices * _RANK * 4
        of = [tables.of(module.name, layer) for layer in range(num_layers)]
        a, b = arena.a(module.name), arena.b(module.name)
        shrinks = [
            partial(down, x, v, a=a[n], tables=of[n], plan=plan, tiles=tiles)
            for n in range(num_layers)
        ]
        expands = [
            partial(up, v, y, b=b[n], tables=of[n], plan=plan, tiles=tiles)
            for n in range(num_layers)
        ]
        shrink_bytes = weights * module.in_features * slices + x.nbytes + v_bytes
        expand_bytes = weights * module.out_features + 2 * y.nbytes + v_bytes
        title = f"{shape.name} {module.name}, {name}"
        results.append(_line(world, f"{kind}shrink {title}", shrinks, shrink_bytes))
        results.append(_line(world, f"{kind}expand {title}", expands, expand_bytes))
    return results


def _rank_space(
    x: Tensor, arena: Arena, module: str, plan: DevicePlan, tiles: LoraTiles | RowTiles
) -> Tensor:
    num_splits = num_feature_splits(x.shape[1], tiles.max_splits)
    width = max(next_power_of_2(plan.max_rank), tiles.block_r)
    shape = (num_splits, arena.module(module).num_slices, plan.num_tokens, width)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _attention(world: World, shape: Shape) -> list[dict[str, object]]:
    results = []
    for name, wanted in _CONTEXTS.items():
        chunks = [(min(rows, 4), 20) for rows, _ in wanted[:2]] if world.dry else wanted
        inputs = step_inputs(world, chunks, shape.vocab_size)
        num_cells = sum(context for _, context in chunks)
        kv = kv_storage(world, shape, sum(-(-context // BLOCK_SIZE) for _, context in chunks))
        plan = plan_attention(
            inputs.chunks,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            dtype=world.dtype,
            device=world.device,
        )
        q = world.randn(inputs.num_tokens, shape.num_heads, shape.head_dim)
        out = torch.empty_like(q)
        scale = shape.head_dim**-0.5
        calls = [
            partial(paged_attention, q, out, k=kv.k[n], v=kv.v[n], plan=plan, scale=scale)
            for n in range(1 if world.dry else _NUM_LAYERS)
        ]
        cell_bytes = 2 * shape.num_kv_heads * shape.head_dim * q.element_size()
        num_bytes = num_cells * cell_bytes + 2 * q.nbytes
        results.append(_line(world, f"attention {shape.name}, {name}", calls, num_bytes))
    return results
