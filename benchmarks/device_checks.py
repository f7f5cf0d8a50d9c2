"""The kernels against the definition on a device, in bf16 and in the shapes of real models."""

import torch
from torch import Tensor

from benchmarks.device_world import BLOCK_SIZE, Shape, World, kv_storage, random_arena, step_inputs
from engine.model.attention import attend, plan_attention
from punica_kernels import attention_tiles, reference
from punica_kernels.arena import Arena, Span
from punica_kernels.fused_layers import add_rms_norm, silu_mul
from punica_kernels.paged_attention import paged_attention
from punica_kernels.plan import LoraPlan, build_plan
from punica_kernels.triton_lora import TritonLora

_TOLERANCE = 2e-2  # of results whose size is about 1: two roundings to bf16
_NUM_LAYERS = 2
# (adapter or None, rows): what a step may look like.
_BATCHES = {
    "a row of each adapter": [(index, 1) for index in range(8)],
    "short runs and the base": [(0, 3), (None, 4), (5, 16), (1, 1), (7, 2)],
    "a prompt": [(None, 1), (2, 300), (3, 1), (4, 17)],
}
_RANKS = [8, 16, 64, 5, 32, 100, 16, 256]


def check_kernels(world: World) -> list[dict[str, object]]:
    """Return a line for each comparison: what, largest error, whether it is within tolerance."""
    results = []
    for shape in world.shapes:
        results += _check_lora(world, shape)
        results.append(_check_neighbours(world, shape))
        results += _check_attention(world, shape)
        results += _check_layers(world, shape)
    return results


def _line(what: str, ours: Tensor, wanted: Tensor) -> dict[str, object]:
    """Compare where the definition has numbers; elsewhere nothing may have been written."""
    numbers = wanted.isfinite()
    untouched = bool(ours[~numbers].isnan().all())
    error = float((ours.float() - wanted.float())[numbers].abs().max())
    size = float(wanted.float()[numbers].abs().max())
    passed = untouched and error <= _TOLERANCE * max(size, 1.0)
    return {"check": what, "largest_error": error, "largest_value": size, "passed": passed}


def _check_lora(world: World, shape: Shape) -> list[dict[str, object]]:
    ranks = [min(rank, 8) for rank in _RANKS] if world.dry else _RANKS
    arena = random_arena(world, shape, [*ranks, 1], num_layers=_NUM_LAYERS)
    _poison_last_row(arena)
    lora = TritonLora(arena)
    results = []
    for name, runs in _BATCHES.items():
        short = [(index, min(rows, 20)) for index, rows in runs] if world.dry else runs
        plan = build_plan([index for index, _ in short], [rows for _, rows in short])
        assert plan is not None
        for module in arena.modules:
            x, y = _inputs(world, plan, module.in_features, module.out_features)
            wanted = y.clone()
            reference.add_lora(wanted, x, arena=arena, module=module.name, layer=1, plan=plan)
            lora.add_lora(y, x, module=module.name, layer=1, plan=lora.plan(plan))
            results.append(_line(f"{shape.name} lora {module.name}, {name}", y, wanted))
    return results


def _check_neighbours(world: World, shape: Shape) -> dict[str, object]:
    """Grade E3: what a row gets is bitwise the same alone and among others."""
    arena = random_arena(world, shape, [8, 16], num_layers=1)
    lora, module = TritonLora(arena), arena.modules[-1]
    largest = 0.0
    for rows in (1, 5):
        x, mine = world.randn(rows + 19, module.in_features), slice(7, 7 + rows)
        results = []
        for part, runs in ((x[mine], [(0, rows)]), (x, [(1, 7), (0, rows), (1, 12)])):
            plan = build_plan([index for index, _ in runs], [length for _, length in runs])
            assert plan is not None
            y = torch.zeros(len(part), module.out_features, dtype=x.dtype, device=x.device)
            lora.add_lora(y, part, module=module.name, layer=0, plan=lora.plan(plan))
            results.append(y)
        alone, among = results
        largest = max(largest, float((alone.float() - among[mine].float()).abs().max()))
    return {"check": f"{shape.name} neighbours", "largest_error": largest, "passed": largest == 0.0}


def _poison_last_row(arena: Arena) -> None:
    """Make the last adapter nobody's and its row NaN."""
    last = len(_RANKS)
    row0 = arena.spans(last)["attention"].row0
    arena.clear_adapter(last)
    for module in arena.modules:
        arena.a(module.name)[:, :, row0:] = torch.nan
        arena.b(module.name)[:, row0:] = torch.nan
    # And an adapter of half its span's rank, whose other rows are NaN, too.
    span = arena.spans(2)["attention"]
    half = span.num_rows // 2
    ranks = {m.name: [[half] * m.num_slices] * _NUM_LAYERS for m in arena.modules}
    spans = {"attention": span, "mlp": Span(row0=span.row0, num_rows=span.num_rows)}
    for module in arena.modules:
        arena.a(module.name)[:, :, span.row0 + half : span.stop] = torch.nan
        arena.b(module.name)[:, span.row0 + half : span.stop] = torch.nan
    arena.set_adapter(2, spans=spans, ranks=ranks, scales=ranks)


def _inputs(
    world: World, plan: LoraPlan, in_features: int, out_features: int
) -> tuple[Tensor, Tensor]:
    """Return x and y, NaN in rows of the base."""
    x, y = world.randn(plan.num_tokens, in_features), world.randn(plan.num_tokens, out_features)
    mask = torch.ones(plan.num_tokens, dtype=torch.bool, device=world.device)
    for segment in plan.segments:
        mask[segment.start : segment.stop] = False
    x[mask], y[mask] = torch.nan, torch.nan
    return x, y


def _check_attention(world: World, shape: Shape) -> list[dict[str, object]]:
    batches = {
        "decodes": [(1, length) for length in (1, 15, 700, 1500)],
        "mixed": [(1, 33), (130, 130), (40, 600), (1, 900)],
    }
    results = []
    for name, chunks in batches.items():
        if world.dry:
            chunks = [(min(rows, 6), min(context, 20)) for rows, context in chunks]  # noqa: PLW2901
        inputs = step_inputs(world, chunks, shape.vocab_size)
        num_blocks = sum(-(-context // BLOCK_SIZE) for _, context in chunks)
        kv = kv_storage(world, shape, num_blocks + 1)
        kv.k[:, -1], kv.v[:, -1] = torch.nan, torch.nan
        q = world.randn(inputs.num_tokens, shape.num_heads, shape.head_dim)
        wanted = attend(q, kv, 1, plan_attention(inputs.chunks, kv)).view_as(q)
        plan = attention_tiles.plan_attention(
            inputs.chunks,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            dtype=world.dtype,
            device=world.device,
        )
        out = torch.full_like(q, torch.nan)
        paged_attention(q, out, k=kv.k[1], v=kv.v[1], plan=plan, scale=shape.head_dim**-0.5)
        results.append(_line(f"{shape.name} attention, {name}", out, wanted))
    return results


def _check_layers(world: World, shape: Shape) -> list[dict[str, object]]:
    y, residual = world.randn(9, shape.hidden), world.randn(9, shape.hidden)
    weight = world.randn(shape.hidden)
    total = residual + y
    wanted = torch.nn.functional.rms_norm(total, (shape.hidden,), None, 1e-5) * weight
    normed = add_rms_norm(residual, y, weight, 1e-5)
    gate_up = world.randn(9, 2 * shape.intermediate)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return [
        _line(f"{shape.name} residual", residual, total),
        _line(f"{shape.name} norm", normed, wanted),
        _line(f"{shape.name} silu·mul", silu_mul(gate_up), torch.nn.functional.silu(gate) * up),
    ]
