"""A whole model on a device: grade E2 of its kernels, what adapters cost, how fast they load."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.device_world import (
    BLOCK_SIZE,
    World,
    kv_storage,
    random_arena,
    random_decoder,
    set_adapter,
    step_inputs,
)
from engine.kvcache.storage import KVStorage
from engine.model.decoder import Decoder
from engine.model.inputs import LoraStep, StepInputs
from engine.model.step_kernels import KernelStep, PlainKernels
from engine.model.triton_kernels import TritonKernels
from punica_kernels.arena import Arena, Span
from punica_kernels.plan import LoraPlan, build_plan
from punica_kernels.triton_lora import TritonLora

_DECODE_ROWS = 64
_CONTEXT = 512
_NUM_LOADS = 8
_NUM_SWAPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Kernels whose next step is planned already, so that a graph can hold the step."""

    step: KernelStep
    name: str = "prepared"

    def begin(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> KernelStep:
        return self.step


@torch.inference_mode()
def grade_e2(world: World) -> dict[str, object]:
    """Compare Triton's kernels with plain torch: same weights, same tokens, all fed to both.

    A row on which the two differ is excused where the plain one's best two logits are closer than
    twice the gap between both.
    """
    shape = world.shapes[0]
    lengths = [5, 9, 3] if world.dry else [200, 130, 70, 300, 1, 33]
    owners: list[int | None] = [None, 0, 1, 2, 0, 2][: len(lengths)]
    arena = random_arena(world, shape, [4, 8, 3] if world.dry else [16, 64, 8])
    plan = build_plan(owners, lengths)
    logits = []
    for kernels in (PlainKernels, TritonKernels):
        decoder = random_decoder(world, shape, kernels)
        inputs = step_inputs(world, [(length, length) for length in lengths], shape.vocab_size)
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
        kv = kv_storage(world, shape, num_blocks)
        hidden = decoder.forward(inputs, kv, _lora_step(arena, plan))
        logits.append(decoder.head(hidden, None))
    plain, ours = logits
    gap = float((plain - ours).abs().max())
    differs = plain.argmax(-1) != ours.argmax(-1)
    best_two = plain[differs].topk(2, dim=-1).values
    margins = best_two[:, 0] - best_two[:, 1]
    return {
        "model": shape.name,
        "rows": len(plain),
        "agreement": 1.0 - float(differs.float().mean()),
        "largest_gap": gap,
        "largest_logit": float(plain.abs().max()),
        "unexcused": int((margins >= 2 * gap).sum()),
    }


@torch.inference_mode()
def decode_overhead(world: World) -> list[dict[str, object]]:
    """Return milliseconds of a decode step of 64 rows, as a graph, by distinct adapters."""
    results = []
    for shape in world.shapes:
        rows, context = (4, 20) if world.dry else (_DECODE_ROWS, _CONTEXT)
        decoder = random_decoder(world, shape, TritonKernels)
        kv = kv_storage(world, shape, rows * -(-context // BLOCK_SIZE))
        inputs = step_inputs(world, [(1, context)] * rows, shape.vocab_size)
        base_s = _step_seconds(world, decoder, inputs, kv, None)
        results.append(
            {"model": shape.name, "adapters": 0, "ranks": "", "ms": base_s * 1e3, "overhead": 0.0}
        )
        for count in (1, 2) if world.dry else (1, 8, 32, 64):
            for label, ranks in (("16", [16]), ("8 to 64", [8, 16, 32, 64])):
                widths = [ranks[index % len(ranks)] for index in range(count)]
                arena = random_arena(world, shape, widths)
                owners = sorted(row % count for row in range(rows))
                plan = build_plan(owners, [1] * rows)
                seconds = _step_seconds(world, decoder, inputs, kv, _lora_step(arena, plan))
                results.append(
                    {
                        "model": shape.name,
                        "adapters": count,
                        "ranks": label,
                        "ms": seconds * 1e3,
                        "overhead": seconds / base_s - 1,
                    }
                )
                del arena
    return results


def _lora_step(arena: Arena, plan: LoraPlan | None) -> LoraStep:
    assert plan is not None, "some row carries an adapter"
    return LoraStep(arena=arena, plan=plan)


def _step_seconds(
    world: World, decoder: Decoder, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None
) -> float:
    kernels = decoder.kernels
    decoder.kernels = Prepared(step=kernels.begin(inputs, kv, lora))
    seconds = world.seconds(lambda: decoder.forward(inputs, kv, lora))
    decoder.kernels = kernels
    return seconds


def load_figures(world: World) -> list[dict[str, object]]:
    """Return how long an adapter of rank 16 takes into the arena, and a swap of tables alone."""
    shape, rank = world.shapes[0], 16
    arena = random_arena(world, shape, [rank] * 2)
    images = _images(world, arena, rank)
    num_bytes = sum(a.nbytes + b.nbytes for a, b in images.values())
    spans = [Span(row0=rank * index, num_rows=rank) for index in range(2)]
    _load(world, arena, images, spans[0])
    start = time.perf_counter()
    num_loads = 1 if world.dry else _NUM_LOADS
    for index in range(num_loads):
        _load(world, arena, images, spans[index % 2])
    load_s = (time.perf_counter() - start) / num_loads
    lora, plan = TritonLora(arena), build_plan([0], [1])
    assert plan is not None
    start = time.perf_counter()
    num_swaps = 2 if world.dry else _NUM_SWAPS
    for index in range(num_swaps):
        set_adapter(arena, 0, spans[index % 2])
        lora.plan(plan)
    world.synchronize()
    swap_s = (time.perf_counter() - start) / num_swaps
    return [
        {
            "what": f"load, rank {rank}, all modules of {shape.name}",
            "ms": load_s * 1e3,
            "bytes_per_s": num_bytes / load_s,
        },
        {"what": "swap of an adapter's tables, and a plan with it", "ms": swap_s * 1e3},
    ]


def _images(world: World, arena: Arena, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each module's rows as they'd lie in a pinned image: a of all slices, and b."""
    images = {}
    for module in arena.modules:
        pinned = world.device.type == "cuda"
        a_shape = (arena.num_layers, module.num_slices, rank, module.in_features)
        b_shape = (arena.num_layers, rank, module.out_features)
        a, b = (torch.zeros(shape, dtype=world.dtype) for shape in (a_shape, b_shape))
        images[module.name] = (a.pin_memory(), b.pin_memory()) if pinned else (a, b)
    return images


def _load(world: World, arena: Arena, images: dict[str, tuple[Tensor, Tensor]], span: Span) -> None:
    """Copy an image into the arena, beside whatever the device is doing."""
    rows = slice(span.row0, span.stop)
    for name, (a, b) in images.items():
        arena.a(name)[:, :, rows].copy_(a, non_blocking=True)
        arena.b(name)[:, rows].copy_(b, non_blocking=True)
    world.synchronize()


def lines_of(results: Sequence[dict[str, object]]) -> list[str]:
    """Return results as lines of text."""
    return [
        "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in line.items()
        )
        for line in results
    ]
