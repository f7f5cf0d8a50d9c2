"""Compiles the kernels of a decoder before it serves, so that no request waits for a compiler."""

import time
from collections.abc import Callable, Sequence

from engine.kvcache.storage import KVStorage
from engine.model.decoder import Decoder
from engine.model.runner import ModelRunner
from engine.protocol import SamplingParams
from engine.scheduler.plan import Chunk, StepPlan
from engine.sequence import Sequence as EngineSequence
from punica_kernels.arena import Arena, ModuleSpec, Span

MANY_TOKENS = 160  # a chunk that takes the paths for long chunks and for parallel rows
_NOTICED_AFTER_S = 2.0


def warm_up(
    decoder: Decoder,
    modules: Sequence[ModuleSpec],
    *,
    block_size: int,
    progress: Callable[[str], None],
) -> None:
    """Run steps of every kind once: long and short chunks, one segment of LoRA and several.

    modules  those of the arena; empty without LoRA
    """
    progress(f"compiling the {decoder.kernels.name} kernels (once; then they are read from disk)")
    began_s = time.monotonic()
    arena = _arena(decoder, modules) if modules else None
    kv = _kv(decoder, num_blocks=MANY_TOKENS // block_size + 4, block_size=block_size)
    runner = ModelRunner(decoder=decoder, kv=kv, arena=arena)
    lora_index = None if arena is None else 0
    for chunks in ([(0, MANY_TOKENS)], [(9, 1)], [(9, 1), (20, 3), (3, 1)]):
        # The base's chunk between them keeps the adapter's two from being one segment.
        lora_indices = [lora_index, None, lora_index][: len(chunks)]
        runner.run(_plan(chunks, lora_indices, block_size))
    took_s = time.monotonic() - began_s
    if took_s >= _NOTICED_AFTER_S:
        progress(f"the kernels were compiled in {took_s:.0f} s")


def _plan(
    chunks: Sequence[tuple[int, int]], lora_indices: Sequence[int | None], block_size: int
) -> StepPlan:
    """Return chunks of (tokens computed earlier, tokens now), each with its adapter or the base."""
    made = []
    table0 = 0
    for number, (num_earlier, num_tokens) in enumerate(chunks):
        stop = num_earlier + num_tokens
        num_blocks = -(-stop // block_size)
        sequence = EngineSequence(
            request_id=f"warm-up-{number}",
            token_ids=[0] * stop,
            num_prompt_tokens=stop,
            params=SamplingParams(max_tokens=1),
            seed=0,
            eos_token_ids=(),
            block_table=list(range(table0, table0 + num_blocks)),
        )
        table0 += num_blocks
        chunk = Chunk(
            sequence=sequence,
            start=num_earlier,
            num_tokens=num_tokens,
            samples=True,
            lora_index=lora_indices[number],
        )
        made.append(chunk)
    return StepPlan(chunks=tuple(made))


def _kv(decoder: Decoder, *, num_blocks: int, block_size: int) -> KVStorage:
    spec = decoder.spec
    return KVStorage(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=decoder.embedding.dtype,
        device=decoder.embedding.device,
    )


def _arena(decoder: Decoder, modules: Sequence[ModuleSpec]) -> Arena:
    """Return an arena of one adapter of rank 1, all zeros."""
    arena = Arena(
        modules=modules,
        num_layers=decoder.spec.num_layers,
        num_rows=dict.fromkeys({module.group for module in modules}, 1),
        dtype=decoder.embedding.dtype,
        device=decoder.embedding.device,
    )
    tables = {
        module.name: [[1] * module.num_slices] * arena.num_layers_of(module.name)
        for module in modules
    }
    spans = dict.fromkeys(arena.num_rows, Span(row0=0, num_rows=1))
    arena.set_adapter(0, spans=spans, ranks=tables, scales=tables)
    return arena
