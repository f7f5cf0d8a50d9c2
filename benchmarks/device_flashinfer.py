"""FlashInfer's attention beside ours over one prompt, where it is installed and agrees."""

from functools import partial

import torch

from benchmarks.device_world import BLOCK_SIZE, World, kv_storage, step_inputs
from engine.model.attention_choice import choose_attention
from punica_kernels.attention_tiles import plan_attention
from punica_kernels.flashinfer_attention import AttentionShape
from punica_kernels.paged_attention import paged_attention

_NUM_LAYERS = 8  # so many that a cache doesn't hold all of them at once
_NUM_TOKENS = 1024


def compare_attention(world: World) -> dict[str, object]:
    """Return one line with both times of a layer, neither captured; or why there is none."""
    shape = world.shapes[-1]
    heads = AttentionShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        dtype=world.dtype,
    )
    choice = choose_attention("auto", shape=heads, device=world.device, progress=print)
    if choice.flashinfer is None:
        return {"flashinfer": f"skipped; {choice.reason}"}
    inputs = step_inputs(world, [(_NUM_TOKENS, _NUM_TOKENS)], shape.vocab_size)
    kv = kv_storage(world, shape, _NUM_TOKENS // BLOCK_SIZE)
    ours = plan_attention(
        inputs.chunks,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        dtype=world.dtype,
        device=world.device,
    )
    theirs = choice.flashinfer.plan(inputs.chunks)
    q = world.randn(_NUM_TOKENS, shape.num_heads, shape.head_dim)
    out, scale = torch.empty_like(q), shape.head_dim**-0.5
    calls = {
        "ours": [
            partial(paged_attention, q, out, k=kv.k[n], v=kv.v[n], plan=ours, scale=scale)
            for n in range(_NUM_LAYERS)
        ],
        "flashinfer": [partial(theirs.attend, q, k=kv.k[n], v=kv.v[n]) for n in range(_NUM_LAYERS)],
    }
    line: dict[str, object] = {
        "attention": f"{shape.name}, a prompt of {_NUM_TOKENS}",
        "chosen": choice.reason,
    }
    for name, layers in calls.items():
        seconds = world.eager_seconds(lambda layers=layers: [call() for call in layers])
        line[f"{name}_microseconds"] = seconds / _NUM_LAYERS * 1e6
    return {"flashinfer": [line]}
