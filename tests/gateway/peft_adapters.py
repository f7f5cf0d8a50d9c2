"""Real adapters: made by PEFT on a tiny random Llama, saved by PEFT."""

import warnings
from pathlib import Path

from adapters.base_description import BaseDescription, LinearShape

HIDDEN, KV, MLP, NUM_LAYERS = 32, 16, 48, 2


def tiny_base(base_id: str = "tiny") -> BaseDescription:
    """What the worker of that tiny Llama would announce."""

    def shape(in_features: int, out_features: int) -> LinearShape:
        return LinearShape(in_features=in_features, out_features=out_features)

    return BaseDescription(
        base_id=base_id,
        identity="sha256:" + "ab" * 32,
        architecture="LlamaForCausalLM",
        num_layers=NUM_LAYERS,
        hidden=HIDDEN,
        vocab_size=64,
        max_model_len=128,
        tie_word_embeddings=False,
        modules={
            "q_proj": shape(HIDDEN, HIDDEN),
            "k_proj": shape(HIDDEN, KV),
            "v_proj": shape(HIDDEN, KV),
            "o_proj": shape(HIDDEN, HIDDEN),
            "gate_proj": shape(HIDDEN, MLP),
            "up_proj": shape(HIDDEN, MLP),
            "down_proj": shape(MLP, HIDDEN),
        },
    )


def save_adapters(root: Path, names: list[str]) -> dict[str, Path]:
    """Save one adapter per name, each with weights of its own."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=128,
    )
    folders = {}
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        lora = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        folders[name] = root / name
        with warnings.catch_warnings():
            # PEFT asks transformers by a name that transformers is about to drop.
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(LlamaForCausalLM(config), lora)
            model.save_pretrained(folders[name])
    return folders
