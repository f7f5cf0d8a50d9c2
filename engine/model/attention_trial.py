"""Runs another package's attention once, at start, and compares it with plain torch."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from engine.kvcache.storage import KVStorage
from engine.model.attention import attend, plan_attention
from engine.model.inputs import ChunkInput
from punica_kernels.flashinfer_attention import AttentionShape, FlashInferAttention

# (rows, context) of each chunk. FlashInfer has kernels for long chunks, and others for short ones.
_STEPS = (
    ((160, 201), (1, 33), (3, 20), (1, 1)),
    ((5, 5), (1, 40)),
)
_TOLERANCE = 2e-2  # of results whose size is about 1: two roundings to bf16


@torch.inference_mode()
def trial_problem(
    attention: FlashInferAttention, *, shape: AttentionShape, device: torch.device
) -> str | None:
    """Say how far its rows are from plain torch's, if that is too far; None: near enough.

    Over random q, K and V for the model's own heads, in scattered blocks; raises what it raises.
    """
    generator = torch.Generator().manual_seed(0)
    for lengths in _STEPS:
        chunks, num_blocks = _scattered(lengths, shape.block_size)
        kv = KVStorage(
            num_layers=1,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=device,
        )
        kv.k.copy_(torch.randn(kv.k.shape, generator=generator))
        kv.v.copy_(torch.randn(kv.v.shape, generator=generator))
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        q = torch.randn((num_rows, shape.num_heads, shape.head_dim), generator=generator)
        q = q.to(device=device, dtype=shape.dtype)
        wanted = attend(q, kv, 0, plan_attention(chunks, kv)).view_as(q)
        found = attention.plan(chunks).attend(q, k=kv.k[0], v=kv.v[0])
        error = float((found.float() - wanted.float()).abs().max())
        if not error <= _TOLERANCE:  # NaN isn't, either
            return f"in a trial its result was off by {error:.3g}"
    return None


def _scattered(lengths: Sequence[tuple[int, int]], block_size: int) -> tuple[list[ChunkInput], int]:
    """Return chunks of (rows, context) whose blocks run backwards, and the number of blocks."""
    counts = [-(-context_len // block_size) for _, context_len in lengths]
    row0s = accumulate((num_tokens for num_tokens, _ in lengths), initial=0)
    stops = accumulate(counts)
    chunks = [
        ChunkInput(
            row0=row0,
            num_tokens=num_tokens,
            context_len=context_len,
            block_table=range(stop - 1, stop - count - 1, -1),
        )
        for row0, (num_tokens, context_len), stop, count in zip(
            row0s, lengths, stops, counts, strict=False
        )
    ]
    return chunks, sum(counts)
