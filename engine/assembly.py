"""Builds a core out of a loaded model: measures, divides the memory, wires the parts."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from adapters.base_description import BaseDescription, LinearShape
from engine.config import EngineConfig
from engine.core import EngineCore, ModelLimits
from engine.kvcache.block_pool import BlockPool
from engine.kvcache.cache_manager import CacheManager
from engine.kvcache.storage import KVStorage
from engine.lora.arena_allocator import ArenaAllocator
from engine.lora.image_dir import own_image_dir
from engine.lora.lifecycle import AdapterLifecycle
from engine.lora.loader import LoaderClient
from engine.lora.residency import AdapterResidency
from engine.lora.weights import ArenaWriter
from engine.model.cuda_graphs import CudaCapture, DecodeGraphs
from engine.model.device import device_share
from engine.model.loading import LoadedModel, load_model
from engine.model.memory import (
    MemorySplit,
    cuda_budget_bytes,
    host_budget_bytes,
    peak_meter,
    split_memory,
)
from engine.model.out_of_memory import allocating
from engine.model.runner import ModelRunner
from engine.model.warm_up import warm_up
from engine.protocol import CoreReady, ModuleShape, SamplingParams
from engine.scheduler.fair_queue import QueuePolicy
from engine.scheduler.plan import Chunk, StepPlan
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from punica_kernels.arena import Arena, ModuleSpec

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def load_for(config: EngineConfig, *, progress: Callable[[str], None]) -> LoadedModel:
    """Load the model of `config` with as many threads as it says."""
    torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
    return load_model(config, progress=progress)


def build_core(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[EngineCore, MemorySplit]:
    """Return a core that is ready to step, and how its memory was divided.

    Raises InvalidModel in words if the budget can't hold one sequence of full length, or the
    device what is allocated here.
    """
    max_model_len = max_model_len_of(config, loaded)
    modules = module_specs(loaded) if config.enable_lora else []
    kernels, device = loaded.decoder.kernels, loaded.device
    if config.kernels != "torch" and device.type == "cpu":
        num_laid_out = loaded.decoder.prepack()
        num_products = len(loaded.decoder.linears())
        progress(f"{num_laid_out} of {num_products} weights are in the matrix library's own layout")
    if kernels.name == "numba" or (kernels.name == "triton" and device.type == "cuda"):
        with allocating("a first small step", device=device, remedy="serve a smaller model"):
            warm_up(loaded.decoder, modules, block_size=config.block_size, progress=progress)
    progress("measuring one step of full size")
    split = _measured_split(config, loaded, modules, max_model_len=max_model_len)
    kv, arena = _allocate(config, loaded, modules, split)
    graphs = _decode_graphs(config, loaded, kv)
    runner = ModelRunner(decoder=loaded.decoder, kv=kv, arena=arena, graphs=graphs)
    adapters = None
    if arena is not None:
        adapters = _adapters(config, loaded, arena, split.lora_rows, clock=clock)
    scheduler = Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_tokens_per_step=config.max_tokens_per_step,
        max_waiting_seqs=config.max_waiting_seqs,
        max_model_len=max_model_len,
        cache=CacheManager(BlockPool(split.num_blocks), block_size=config.block_size),
        residency=None if adapters is None else adapters.residency,
        policy=QueuePolicy(config.scheduling),
    )
    limits = ModelLimits(
        base_identity=loaded.identity,
        max_model_len=max_model_len,
        vocab_size=loaded.spec.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
    )
    core = EngineCore(
        scheduler=scheduler, runner=runner, adapters=adapters, limits=limits, clock=clock
    )
    return core, split


def describe(
    config: EngineConfig, loaded: LoadedModel, split: MemorySplit, core: EngineCore
) -> CoreReady:
    """Return what the server needs to know of a core that is ready."""
    base = base_description(loaded, core.limits.max_model_len, lora_rows=split.lora_rows)
    return CoreReady(
        base_id=base.base_id,
        base_identity=base.identity,
        architecture=base.architecture,
        model_dir=str(loaded.model_dir),
        dtype=DTYPE_NAMES[loaded.dtype],
        vocab_size=base.vocab_size,
        num_layers=base.num_layers,
        hidden=base.hidden,
        max_model_len=base.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        modules={
            name: ModuleShape(shape.in_features, shape.out_features)
            for name, shape in base.modules.items()
        },
        tie_word_embeddings=base.tie_word_embeddings,
        lora_rows=split.lora_rows,
        num_blocks=split.num_blocks,
        block_size=config.block_size,
        memory=split.as_numbers(),
        embedding_digests=base.embedding_digests,
    )


def max_model_len_of(config: EngineConfig, loaded: LoadedModel) -> int:
    """Return the operator's limit, or the checkpoint's; never more than the checkpoint's."""
    return min(config.max_model_len or loaded.spec.max_model_len, loaded.spec.max_model_len)


def module_specs(loaded: LoadedModel) -> list[ModuleSpec]:
    """Return the LoRA modules: those of a layer with their slices in column order, then the two
    outside the layers.
    """
    spec = loaded.spec
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return [
        ModuleSpec(
            name="qkv", group="attention", in_features=spec.hidden, slice_out_features=(q, kv, kv)
        ),
        ModuleSpec(name="o", group="attention", in_features=q, slice_out_features=(spec.hidden,)),
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
        ModuleSpec(
            name="embedding",
            group="embedding",
            in_features=spec.vocab_size,
            slice_out_features=(spec.hidden,),
            num_layers=1,
        ),
        ModuleSpec(
            name="head",
            group="head",
            in_features=spec.hidden,
            slice_out_features=(spec.vocab_size,),
            num_layers=1,
        ),
    ]


def base_description(
    loaded: LoadedModel, max_model_len: int, *, lora_rows: dict[str, int]
) -> BaseDescription:
    """Return the module table of the loaded base."""
    spec = loaded.spec
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return BaseDescription(
        base_id=loaded.base_id,
        identity=loaded.identity,
        architecture=spec.architecture,
        num_layers=spec.num_layers,
        hidden=spec.hidden,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        tie_word_embeddings=spec.tie_word_embeddings,
        modules={
            "q_proj": LinearShape(spec.hidden, q),
            "k_proj": LinearShape(spec.hidden, kv),
            "v_proj": LinearShape(spec.hidden, kv),
            "o_proj": LinearShape(q, spec.hidden),
            "gate_proj": LinearShape(spec.hidden, spec.intermediate),
            "up_proj": LinearShape(spec.hidden, spec.intermediate),
            "down_proj": LinearShape(spec.intermediate, spec.hidden),
        },
        lora_rows=lora_rows,
        embedding_digests=loaded.embedding_digests,
    )


def _measured_split(
    config: EngineConfig,
    loaded: LoadedModel,
    modules: list[ModuleSpec],
    *,
    max_model_len: int,
) -> MemorySplit:
    budget_bytes = config.memory_bytes or _measured_budget(config, loaded)
    with allocating(
        f"a step of {config.max_tokens_per_step} tokens",
        device=loaded.device,
        remedy="lower --max-tokens-per-step",
    ):
        activation_bytes = _activation_bytes(config, loaded)
    blocks_per_sequence = -(-max_model_len // config.block_size)
    row_bytes = (
        Arena.row_bytes(modules=modules, num_layers=loaded.spec.num_layers, dtype=loaded.dtype)
        if modules
        else {}
    )
    return split_memory(
        budget_bytes=budget_bytes,
        weight_bytes=loaded.weight_bytes,
        activation_bytes=activation_bytes,
        block_bytes=_kv_storage(loaded, num_blocks=1, block_size=config.block_size).block_bytes,
        row_bytes=row_bytes,
        max_blocks=blocks_per_sequence * config.max_num_seqs,
        min_blocks=blocks_per_sequence,
    )


def _measured_budget(config: EngineConfig, loaded: LoadedModel) -> int:
    if loaded.device.type != "cuda":
        return host_budget_bytes()
    share = device_share(config.worker_index, num_workers=config.num_workers)
    return cuda_budget_bytes(loaded.device, share, weight_bytes=loaded.weight_bytes)


def _activation_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Run a step of the full token budget over scratch blocks; return what it took on top."""
    num_tokens = min(config.max_tokens_per_step, max_model_len_of(config, loaded))
    num_blocks = -(-num_tokens // config.block_size)
    kv = _kv_storage(loaded, num_blocks=num_blocks, block_size=config.block_size)
    sequence = Sequence(
        request_id="profile",
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        params=SamplingParams(max_tokens=1),
        seed=0,
        eos_token_ids=(),
        block_table=list(range(num_blocks)),
    )
    chunk = Chunk(sequence=sequence, start=0, num_tokens=num_tokens, samples=True, lora_index=None)
    plan = StepPlan(chunks=(chunk,))
    meter = peak_meter(loaded.device)
    ModelRunner(decoder=loaded.decoder, kv=kv, arena=None).run(plan)
    return meter.rise_bytes()


def _allocate(
    config: EngineConfig, loaded: LoadedModel, modules: list[ModuleSpec], split: MemorySplit
) -> tuple[KVStorage, Arena | None]:
    """Make what the budget was split for."""
    device, remedy = loaded.device, "lower --memory"
    with allocating("KV blocks", device=device, num_bytes=split.kv_bytes, remedy=remedy):
        kv = _kv_storage(loaded, num_blocks=split.num_blocks, block_size=config.block_size)
    if not modules:
        return kv, None
    with allocating("adapters", device=device, num_bytes=split.lora_bytes, remedy=remedy):
        return kv, _arena(loaded, modules, split.lora_rows)


def _kv_storage(loaded: LoadedModel, *, num_blocks: int, block_size: int) -> KVStorage:
    return KVStorage(
        num_layers=loaded.spec.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=loaded.spec.num_kv_heads,
        head_dim=loaded.spec.head_dim,
        dtype=loaded.dtype,
        device=loaded.device,
    )


def _decode_graphs(
    config: EngineConfig, loaded: LoadedModel, kv: KVStorage
) -> DecodeGraphs[Any] | None:
    """Return what replays decode steps on CUDA; None where kernels or device have no graphs."""
    if loaded.device.type != "cuda" or loaded.decoder.kernels.name != "triton":
        return None
    from engine.model.triton_kernels import TritonKernels

    assert isinstance(loaded.decoder.kernels, TritonKernels)
    return DecodeGraphs(
        decoder=loaded.decoder,
        kernels=loaded.decoder.kernels,
        kv=kv,
        max_num_seqs=config.max_num_seqs,
        capture=CudaCapture(loaded.device),
    )


def _arena(loaded: LoadedModel, modules: list[ModuleSpec], lora_rows: dict[str, int]) -> Arena:
    return Arena(
        modules=modules,
        num_layers=loaded.spec.num_layers,
        num_rows=lora_rows,
        dtype=loaded.dtype,
        device=loaded.device,
    )


def _adapters(
    config: EngineConfig,
    loaded: LoadedModel,
    arena: Arena,
    lora_rows: dict[str, int],
    *,
    clock: Callable[[], float],
) -> AdapterLifecycle:
    image_dir = own_image_dir(Path(config.state_dir) / "images")
    allocator = {group: ArenaAllocator(num_rows) for group, num_rows in lora_rows.items()}
    return AdapterLifecycle(
        residency=AdapterResidency(allocator=allocator, clock=clock),
        loader=LoaderClient(),
        writer=ArenaWriter(arena),
        base=base_description(loaded, max_model_len_of(config, loaded), lora_rows=lora_rows),
        dtype=DTYPE_NAMES[loaded.dtype],
        image_dir=image_dir,
    )
