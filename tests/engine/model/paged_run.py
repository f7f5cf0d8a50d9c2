"""Runs prompts through a decoder the way a core does: in chunks, in blocks, several at a time."""

import random
from collections.abc import Sequence as SequenceABC
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.kvcache.storage import KVStorage
from engine.model.decoder import Decoder
from engine.model.inputs import build_inputs
from engine.model.loading import LoadedModel, load_model
from engine.protocol import SamplingParams
from engine.scheduler.plan import Chunk, StepPlan
from engine.sequence import Sequence

BLOCK_SIZE = 4


def load(
    model: Path,
    state_dir: Path,
    *,
    dtype: str = "fp32",
    kernels: str = "torch",
    num_threads: int = 1,
) -> LoadedModel:
    """Load a checkpoint with nothing but its place, its format and the threads said."""
    config = EngineConfig(
        model=str(model),
        state_dir=str(state_dir),
        dtype=dtype,
        kernels=kernels,
        num_threads=num_threads,
    )
    return load_model(config, progress=lambda text: None)


def kv_storage(decoder: Decoder, *, num_blocks: int, block_size: int = BLOCK_SIZE) -> KVStorage:
    """Return storage that fits `decoder`, poisoned: only what is wiped or written is a number."""
    spec = decoder.spec
    kv = KVStorage(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=decoder.embedding.dtype,
        device=torch.device("cpu"),
    )
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    return kv


def new_sequence(name: str, token_ids: list[int], block_table: list[int]) -> Sequence:
    """Return a sequence whose blocks are fixed from the start."""
    return Sequence(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        params=SamplingParams(max_tokens=1),
        seed=0,
        eos_token_ids=(),
        block_table=block_table,
    )


def chunk_of(seq: Sequence, num_tokens: int, lora_index: int | None = None) -> Chunk:
    """Return the next chunk of `seq`, of at most `num_tokens`."""
    num_tokens = min(num_tokens, seq.num_missing_tokens)
    return Chunk(
        sequence=seq,
        start=seq.num_computed_tokens,
        num_tokens=num_tokens,
        samples=num_tokens == seq.num_missing_tokens,
        lora_index=lora_index,
    )


@torch.inference_mode()
def paged_logits(
    decoder: Decoder,
    prompts: SequenceABC[list[int]],
    *,
    chunk_sizes: SequenceABC[int],
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return each prompt's logits [num_tokens, vocab], computed over shuffled blocks.

    Every step takes a random set of unfinished prompts, and of each a chunk of a random size.
    """
    rng = random.Random(seed)
    num_blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    block_ids = list(range(sum(num_blocks)))
    rng.shuffle(block_ids)
    kv = kv_storage(decoder, num_blocks=len(block_ids))
    sequences = [
        new_sequence(str(i), prompt, [block_ids.pop() for _ in range(count)])
        for i, (prompt, count) in enumerate(zip(prompts, num_blocks, strict=True))
    ]
    parts: dict[str, list[torch.Tensor]] = {seq.request_id: [] for seq in sequences}
    while unfinished := [seq for seq in sequences if seq.num_missing_tokens]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        chunks = tuple(chunk_of(seq, rng.choice(chunk_sizes)) for seq in chosen)
        inputs = build_inputs(
            StepPlan(chunks=chunks), block_size=BLOCK_SIZE, device=torch.device("cpu")
        )
        logits = decoder.head(decoder.forward(inputs, kv, None), None)
        for chunk, rows in zip(
            chunks, logits.split([chunk.num_tokens for chunk in chunks]), strict=True
        ):
            parts[chunk.sequence.request_id].append(rows)
            chunk.sequence.num_computed_tokens += chunk.num_tokens
    return [torch.cat(parts[seq.request_id]) for seq in sequences]
