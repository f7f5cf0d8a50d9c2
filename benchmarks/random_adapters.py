"""Writes PEFT adapters with small random weights, all linear modules of all layers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def module_shapes(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Return (in_features, out_features) of each module by its path inside a layer."""
    hidden, middle = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, middle),
        "mlp.up_proj": (hidden, middle),
        "mlp.down_proj": (middle, hidden),
    }


def write_adapter(folder: Path, config: PretrainedConfig, *, lora_rank: int, seed: int) -> None:
    """Write adapter_config.json and adapter_model.safetensors (bf16) into `folder`."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(*shape, generator=generator)).to(torch.bfloat16)

    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module, (num_in, num_out) in module_shapes(config).items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = noise(lora_rank, num_in)
            tensors[f"{name}.lora_B.weight"] = noise(num_out, lora_rank)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": lora_rank,
        "lora_alpha": lora_rank,
        "target_modules": TARGETS,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
