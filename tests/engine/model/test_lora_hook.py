"""The decoder adds each adapter where PEFT would: a mixed step equals merged models."""

import copy
from pathlib import Path

import torch

from engine.model.inputs import LoraStep, build_inputs
from engine.scheduler.plan import StepPlan
from punica_kernels.plan import build_plan
from tests.engine.model.checkpoints import VOCAB_SIZE, random_model, reference_logits, save
from tests.engine.model.paged_run import BLOCK_SIZE, chunk_of, kv_storage, load, new_sequence
from tests.engine.test_batching_is_real import arena_of

PROMPTS = [[3, 50, 7, 120, 9], [3, 50, 7, 120, 9], [60, 8, 8, 30], [3, 50, 7, 120, 9, 77]]
LORA_INDICES = [None, 0, 1, 1]
SCALE = 2  # what arena_of gives every slice
TARGETS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "o": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}


@torch.no_grad()
def test_a_mixed_step_equals_merged_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = random_model("qwen3")
    decoder = load(save(model, tmp_path / "model"), tmp_path / "state").decoder
    arena = arena_of(decoder, 2)
    merged = [copy.deepcopy(model) for _ in range(2)]
    for module in arena.modules:
        parent, targets = TARGETS[module.name]
        for layer in range(decoder.spec.num_layers):
            for i, (target, width) in enumerate(
                zip(targets, module.slice_out_features, strict=True)
            ):
                column0 = module.column0(i)
                for index in range(2):
                    rows = slice(2 * index, 2 * index + 2)
                    a = arena.a(module.name)[layer, i, rows]
                    b = arena.b(module.name)[layer, rows, column0 : column0 + width]
                    linear = getattr(getattr(merged[index].model.layers[layer], parent), target)
                    linear.weight += SCALE * b.T @ a

    tables = [[0, 1], [2, 3], [4], [5, 6]]
    sequences = [new_sequence(str(i), PROMPTS[i], tables[i]) for i in range(4)]
    plan = StepPlan(
        chunks=tuple(chunk_of(s, 99, i) for s, i in zip(sequences, LORA_INDICES, strict=True))
    )
    lora_plan = build_plan(LORA_INDICES, [len(prompt) for prompt in PROMPTS])
    assert lora_plan is not None
    inputs = build_inputs(plan, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    kv = kv_storage(decoder, num_blocks=7)
    with torch.inference_mode():
        hidden = decoder.forward(inputs, kv, LoraStep(arena=arena, plan=lora_plan))
        logits = decoder.head(hidden, None)
    assert logits.shape[1] == VOCAB_SIZE
    parts = logits.split([len(prompt) for prompt in PROMPTS])
    models = [model if index is None else merged[index] for index in LORA_INDICES]
    for part, prompt, reference in zip(parts, PROMPTS, models, strict=True):
        assert (part - reference_logits(reference, prompt)).abs().max() <= 1e-3
    assert (parts[0] - parts[1]).abs().max() > 0.1, "the adapter changes the answer"
