"""Arenas of a few adapters in which everything that may not be read is NaN."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from punica_kernels import reference
from punica_kernels.arena import Arena, ModuleSpec, Span
from punica_kernels.plan import LoraPlan

NUM_LAYERS = 2
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}


def module(
    *slice_out_features: int, in_features: int = 48, name: str = "qkv", group: str = "attention"
) -> ModuleSpec:
    return ModuleSpec(
        name=name,
        group=group,
        in_features=in_features,
        slice_out_features=slice_out_features,
    )


def arena_of(
    spec: ModuleSpec,
    adapters: Mapping[int, Sequence[int]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Arena:
    """Return an arena with one module; `adapters` has each lora_index's rank for every slice.

    In layer 0 the ranks stand in reverse order, so that the layers differ. Between two spans lie
    rows of nobody.
    """
    rows = sum(max(ranks) + 1 for ranks in adapters.values())
    arena = Arena(
        modules=[spec],
        num_layers=NUM_LAYERS,
        num_rows={spec.group: rows},
        dtype=dtype,
        device=device,
    )
    arena.a(spec.name).fill_(torch.nan)
    arena.b(spec.name).fill_(torch.nan)
    row0 = 1
    for lora_index, ranks in adapters.items():
        span = Span(row0=row0, num_rows=max(ranks))
        put_adapter(arena, lora_index, span, ranks)
        row0 += max(ranks) + 1
    return arena


def put_adapter(arena: Arena, lora_index: int, span: Span, ranks: Sequence[int]) -> None:
    """Write random weights of these ranks into `span`, and the tables."""
    (spec,) = arena.modules
    table = [list(reversed(ranks)), list(ranks)]
    generator = torch.Generator().manual_seed(lora_index)
    for layer, line in enumerate(table):
        for index, rank in enumerate(line):
            if rank > 0:
                a = torch.randn(rank, spec.in_features, generator=generator)
                b = torch.randn(rank, spec.slice_out_features[index], generator=generator)
                # Sums of ordinary size whatever the shape, so that one tolerance fits all.
                a, b = a / spec.in_features**0.5, b / rank**0.5
                arena.write(spec.name, layer, index, span, a=a, b=b)
    scales = [
        [0.5 + index + layer for index in range(spec.num_slices)] for layer in range(NUM_LAYERS)
    ]
    arena.set_adapter(
        lora_index, spans={spec.group: span}, ranks={spec.name: table}, scales={spec.name: scales}
    )


def inputs_of(
    arena: Arena, plan: LoraPlan, *, layer: int, y_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return y and x, with NaN in every element that no adapter of the plan may touch."""
    (spec,) = arena.modules
    generator = torch.Generator().manual_seed(plan.num_tokens)
    x = torch.randn(plan.num_tokens, spec.in_features, generator=generator)
    y = torch.randn(plan.num_tokens, spec.out_features, generator=generator)
    mask = torch.zeros(y.shape, dtype=torch.bool)
    carries = torch.zeros(plan.num_tokens, dtype=torch.bool)
    for segment in plan.segments:
        rows = slice(segment.start, segment.stop)
        carries[rows] = True
        for part in arena.weights(spec.name, layer, segment.lora_index).slices:
            column0 = spec.column0(part.slice_index)
            mask[rows, column0 : column0 + spec.slice_out_features[part.slice_index]] = True
    x[~carries], y[~mask] = torch.nan, torch.nan
    return (
        y.to(device=arena.device, dtype=y_dtype or arena.dtype),
        x.to(device=arena.device, dtype=arena.dtype),
    )


def expected(y: Tensor, x: Tensor, arena: Arena, plan: LoraPlan, *, layer: int) -> Tensor:
    (spec,) = arena.modules
    result = y.clone()
    reference.add_lora(result, x, arena=arena, module=spec.name, layer=layer, plan=plan)
    return result


def assert_same(result: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Equal up to the order of sums; NaN exactly where it was, so nothing there was written."""
    torch.testing.assert_close(result, wanted, equal_nan=True, **TOLERANCES[dtype])
