"""Tiny random checkpoints, made and saved by transformers itself."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 211
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

VARIANTS = {
    "llama2": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 6}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "llama-bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-bias": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "attention_bias": True}),
}


def random_model(variant: str, **changes: Any) -> PreTrainedModel:
    """Return a model of `variant` whose every tensor matters: no zeros, no ones."""
    config_class, model_class, own = VARIANTS[variant]
    torch.manual_seed(len(variant))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config_class(**{**_SIZES, **own, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or name.endswith(".bias") else 0.12
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=spread)
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """Save `model` as a checkpoint directory that the engine can load."""
    model.save_pretrained(directory, **options)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits [num_tokens, vocab] of one prompt alone."""
    return model(torch.tensor([token_ids])).logits[0].float()
