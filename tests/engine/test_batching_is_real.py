"""One step is one pass: products, weights and temporaries are counted, not believed.

Attention runs in plain torch for now: it gathers each group's K and V and masks. What stands in
for a paged kernel is bounded here.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import engine.model.attention as attention
from engine.model.decoder import Decoder
from engine.model.inputs import build_inputs
from engine.model.runner import ModelRunner
from engine.scheduler.plan import Chunk, StepPlan
from punica_kernels.arena import Arena, ModuleSpec, Span
from tests.engine.model.checkpoints import random_model, save
from tests.engine.model.paged_run import BLOCK_SIZE, chunk_of, kv_storage, load, new_sequence

NUM_LAYERS = 3
CPU = torch.device("cpu")

# (num_earlier, num_tokens, lora_index) of each chunk.
BATCHES = {
    "one decode": [(9, 1, None)],
    "32 decodes": [(9 + i, 1, None) for i in range(32)],
    "one prefill": [(0, 100, None)],
    "mixed": [(0, 40, None), (3, 1, None), (7, 20, None), (30, 1, None), (0, 2, None)],
    "five adapters": [(5, 1, None)] + [(i, 1 + 3 * (i % 2), i) for i in range(5)],
}


class ProductCounter(TorchFunctionMode):
    """Counts calls of F.linear by whether they read a base weight, and every other product."""

    PRODUCTS = frozenset({"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "linear"})

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._base = {tensor.data_ptr() for tensor in decoder.weight_tensors()}
        self.num_base_products = 0
        self.num_other_products = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear and args[1].data_ptr() in self._base:
            self.num_base_products += 1
        elif getattr(func, "__name__", "").strip("_") in self.PRODUCTS:
            self.num_other_products += 1
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's fresh result had."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if torch.is_tensor(arg)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    model = random_model("smollm2", max_position_embeddings=8192, num_hidden_layers=NUM_LAYERS)
    return save(model, directory / "model")


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    return load(checkpoint, checkpoint.parent / "state").decoder


def plan_of(batch: list[tuple[int, int, int | None]]) -> tuple[StepPlan, int]:
    """Return a plan whose sequences own consecutive blocks, and how many blocks that takes."""
    chunks: list[Chunk] = []
    num_blocks = 0
    for index, (num_earlier, num_tokens, lora_index) in enumerate(batch):
        count = -(-(num_earlier + num_tokens) // BLOCK_SIZE)
        table = list(range(num_blocks, num_blocks + count))
        num_blocks += count
        seq = new_sequence(str(index), [index % 200] * (num_earlier + num_tokens), table)
        seq.num_computed_tokens = num_earlier
        chunks.append(chunk_of(seq, num_tokens, lora_index))
    return StepPlan(chunks=tuple(chunks)), num_blocks


def arena_of(decoder: Decoder, num_adapters: int) -> Arena:
    """Return an arena of random rank-2 adapters on every module."""
    spec = decoder.spec
    attention_widths = (spec.q_features, spec.kv_features, spec.kv_features)
    modules = [
        ModuleSpec(
            name="qkv",
            group="attention",
            in_features=spec.hidden,
            slice_out_features=attention_widths,
        ),
        ModuleSpec(
            name="o",
            group="attention",
            in_features=spec.q_features,
            slice_out_features=(spec.hidden,),
        ),
        ModuleSpec(
            name="gate_up",
            group="mlp",
            in_features=spec.hidden,
            slice_out_features=(spec.intermediate, spec.intermediate),
        ),
        ModuleSpec(
            name="down",
            group="mlp",
            in_features=spec.intermediate,
            slice_out_features=(spec.hidden,),
        ),
    ]
    num_rows = 2 * max(num_adapters, 1)
    arena = Arena(
        modules=modules,
        num_layers=spec.num_layers,
        num_rows={"attention": num_rows, "mlp": num_rows},
        dtype=decoder.embedding.dtype,
        device=CPU,
    )
    for module in modules:
        arena.a(module.name).normal_(std=0.1)
        arena.b(module.name).normal_(std=0.1)
    for index in range(num_adapters):
        table = {m.name: [[2] * m.num_slices] * spec.num_layers for m in modules}
        span = Span(row0=2 * index, num_rows=2)
        arena.set_adapter(index, spans={"attention": span, "mlp": span}, ranks=table, scales=table)
    return arena


@pytest.mark.parametrize("name", BATCHES)
def test_a_step_makes_four_products_a_layer_and_one_for_the_head(
    name: str, decoder: Decoder
) -> None:
    plan, num_blocks = plan_of(BATCHES[name])
    kv = kv_storage(decoder, num_blocks=num_blocks)
    kv.k.zero_()
    kv.v.zero_()
    arena = arena_of(decoder, plan.num_adapters)
    runner = ModelRunner(decoder=decoder, kv=kv, arena=arena)
    with ProductCounter(decoder) as counter:
        runner.run(plan)
    assert counter.num_base_products == NUM_LAYERS * 4 + 1
    assert (counter.num_other_products > 0) == (plan.num_adapters > 0)


def test_base_traffic_never_reaches_the_lora_kernels(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a step without adapters has no LoRA call")

    monkeypatch.setattr("engine.model.step_kernels.add_lora", refuse)
    plan, num_blocks = plan_of(BATCHES["mixed"])
    kv = kv_storage(decoder, num_blocks=num_blocks)
    ModelRunner(decoder=decoder, kv=kv, arena=arena_of(decoder, 1)).run(plan)


def storages() -> dict[int, int]:
    """Return bytes of every tensor storage that is alive, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.untyped_storage().nbytes()
    }


def test_every_base_weight_has_one_storage(checkpoint: Path) -> None:
    """Packing leaves no second copy behind, and a tied head is the embedding itself."""
    before = storages()
    loaded = load(checkpoint, checkpoint.parent / "state")
    created = {ptr: size for ptr, size in storages().items() if ptr not in before}
    weights = loaded.decoder.weight_tensors()
    by_address = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
    assert len(by_address) == len(weights)
    assert loaded.decoder.lm_head.weight is loaded.decoder.embedding
    assert sum(by_address.values()) == loaded.weight_bytes
    parameters = random_model("smollm2").num_parameters()
    assert loaded.weight_bytes == 4 * parameters
    rotary_bytes = 2 * loaded.max_model_len * loaded.spec.head_dim * 4
    assert sum(created.values()) == loaded.weight_bytes + rotary_bytes


def largest_tensor_of_forward(decoder: Decoder, batch: list[tuple[int, int, None]]) -> int:
    plan, num_blocks = plan_of(batch)
    kv = kv_storage(decoder, num_blocks=num_blocks)
    kv.k.zero_()
    kv.v.zero_()
    inputs = build_inputs(plan, block_size=BLOCK_SIZE, device=CPU)
    with torch.inference_mode(), LargestTensor() as largest:
        decoder.forward(inputs, kv, None)
    return largest.num_elements


def test_prefill_never_makes_a_matrix_of_tokens_and_context(decoder: Decoder) -> None:
    num_tokens, context = 512, 8000
    largest = largest_tensor_of_forward(decoder, [(context - num_tokens, num_tokens, None)])
    one_tile = attention.MAX_TILE_ROWS * (context + attention.MAX_TILE_ROWS)
    assert largest <= one_tile
    assert largest < num_tokens * context / 3, "the bound says something"


def test_decode_gathers_no_more_than_its_bound(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 100_000
    monkeypatch.setattr(attention, "MAX_GATHER_ELEMENTS", bound)
    slot = decoder.spec.kv_features
    batch = [(1000 + i, 1, None) for i in range(40)]
    assert 40 * 1000 * slot > 5 * bound, "all at once would be too large"
    assert largest_tensor_of_forward(decoder, batch) <= bound
