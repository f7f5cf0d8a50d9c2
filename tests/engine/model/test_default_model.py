"""The default base: its GGUF file gives the model that transformers makes of it."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from engine.model.loading import LoadedModel
from tests.engine.model.checkpoints import reference_logits
from tests.engine.model.paged_run import paged_logits

TEXTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
    "Größe und Übermut: 你好世界 😀 — 12345",
]


@pytest.fixture(scope="module")
def reference(default_gguf: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        default_gguf.parent,
        gguf_file=default_gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()


@pytest.mark.slow
def test_logits_equal_transformers_own_load(
    default_model: LoadedModel, reference: PreTrainedModel
) -> None:
    tokenizer = Tokenizer.from_file(str(default_model.model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    computed = paged_logits(default_model.decoder, prompts, chunk_sizes=(1, 1, 7, 16))
    for prompt, logits in zip(prompts, computed, strict=True):
        assert (logits - reference_logits(reference, prompt)).abs().max() <= 1e-3


@pytest.mark.slow
def test_every_weight_equals_transformers_own_load(
    default_model: LoadedModel, reference: PreTrainedModel
) -> None:
    """Bit for bit: an adapter trained on transformers' load meets the rows it was trained on."""
    for ours, theirs in zip(default_model.decoder.layers, reference.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        packed = torch.cat(
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        )
        assert torch.equal(ours.weights.qkv.weight, packed)
        assert torch.equal(ours.weights.o.weight, attention.o_proj.weight)
        packed = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        assert torch.equal(ours.weights.gate_up.weight, packed)
        assert torch.equal(ours.weights.down.weight, mlp.down_proj.weight)
    assert torch.equal(default_model.decoder.embedding, reference.model.embed_tokens.weight)


@pytest.mark.slow
def test_its_public_face_is_readable(default_model: LoadedModel) -> None:
    assert default_model.base_id == "SmolLM2-135M-Instruct"
    assert default_model.eos_token_ids == (2,)
    assert default_model.max_model_len == 8192
    config = json.loads((default_model.model_dir / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in config["chat_template"]
