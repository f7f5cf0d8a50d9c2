"""Small adapters as PEFT folders, the tiny base's arena, and what the sum should be."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adapters.digest import adapter_digest
from adapters.validate import inspect_directory
from engine.lora.arena_image import build_image
from engine.lora.residency import PendingLoad, RowSpan
from punica_kernels.arena import Arena, ModuleSpec
from tests.adapters.worlds import (
    HIDDEN,
    KV,
    MLP,
    NUM_LAYERS,
    TINY_MODULES,
    config,
    tensor_name,
    tiny_base,
    write_adapter,
)

MODULES = (
    ModuleSpec(
        name="qkv", group="attention", in_features=HIDDEN, slice_out_features=(HIDDEN, KV, KV)
    ),
    ModuleSpec(name="o", group="attention", in_features=HIDDEN, slice_out_features=(HIDDEN,)),
    ModuleSpec(name="gate_up", group="mlp", in_features=HIDDEN, slice_out_features=(MLP, MLP)),
    ModuleSpec(name="down", group="mlp", in_features=MLP, slice_out_features=(HIDDEN,)),
)
PLACES = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", HIDDEN),
    "v_proj": ("qkv", HIDDEN + KV),
    "o_proj": ("o", 0),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", MLP),
    "down_proj": ("down", 0),
}
SCALE = 2.0


def tiny_arena(num_rows: int = 16, dtype: torch.dtype = torch.float32) -> Arena:
    arena = Arena(
        modules=MODULES,
        num_layers=NUM_LAYERS,
        num_rows={"attention": num_rows, "mlp": num_rows},
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for module in MODULES:
        arena.a(module.name).fill_(torch.nan)
        arena.b(module.name).fill_(torch.nan)
    return arena


def factors(ranks: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random A and B of every layer, by PEFT's tensor names; `ranks` by target."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer in range(NUM_LAYERS):
        for target, rank in ranks.items():
            shape = TINY_MODULES[target]
            a = rng.standard_normal((rank, shape.in_features), dtype=np.float32)
            b = rng.standard_normal((shape.out_features, rank), dtype=np.float32)
            arrays[tensor_name(layer, target, "A")] = a
            arrays[tensor_name(layer, target, "B")] = b
    return arrays


def peft_folder(folder: Path, ranks: Mapping[str, int], seed: int = 0) -> Path:
    """Write an adapter of scale 2 with these ranks."""
    fields = config(
        target_modules=list(ranks),
        r=4,
        lora_alpha=8,
        rank_pattern=dict(ranks),
        alpha_pattern={target: SCALE * rank for target, rank in ranks.items()},
    )
    return write_adapter(folder, fields, factors(ranks, seed))


def image_of(folder: Path, path: Path, *, dtype: str = "fp32") -> Path:
    inspection = inspect_directory(folder, tiny_base())
    assert inspection.adapter is not None, inspection.problems
    digest = adapter_digest(inspection.adapter)
    build_image(inspection.adapter, path, content_digest=digest, dtype=dtype)
    return path


def pending_load(
    image: Path, spans: Mapping[str, tuple[int, int]], *, lora_index: int = 0
) -> PendingLoad:
    return PendingLoad(
        lora_id="a",
        lora_index=lora_index,
        image=image,
        spans={group: RowSpan(row0=row0, num_rows=n) for group, (row0, n) in spans.items()},
        evicted=(),
        moves=(),
    )


def delta(
    x: Tensor, ranks: Mapping[str, int], *, module: ModuleSpec, layer: int, seed: int = 0
) -> Tensor:
    """Return what PEFT would add to the module's output for `factors(ranks, seed)`."""
    result = torch.zeros(x.shape[0], module.out_features)
    arrays = factors(ranks, seed)
    for target in ranks:
        name, column0 = PLACES[target]
        if name == module.name:
            a = torch.from_numpy(arrays[tensor_name(layer, target, "A")])
            b = torch.from_numpy(arrays[tensor_name(layer, target, "B")])
            result[:, column0 : column0 + b.shape[0]] += SCALE * (x @ a.T) @ b.T
    return result
