"""config.json out of GGUF metadata."""

from typing import Any

import torch

from engine.errors import InvalidModel
from engine.model.gguf_metadata import GgufMetadata
from engine.model.rotary import inverse_frequencies
from engine.model.spec import SUPPORTED, RopeKind, RopeSpec

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_config(
    metadata: GgufMetadata,
    *,
    vocab_size: int,
    tensor_names: frozenset[str],
    rope_divisors: torch.Tensor | None,  # [head_dim / 2], the tensor rope_freqs.weight
    dtype: str,
) -> dict[str, Any]:
    """Return the config.json that describes the same model; raises InvalidModel in words."""
    if metadata.architecture not in _ARCHITECTURES:
        raise InvalidModel(
            f"GGUF files of architecture {metadata.architecture!r} aren't supported; "
            f"supported are {SUPPORTED}"
        )
    key = metadata.of_architecture
    hidden = metadata.whole(key("embedding_length"))
    num_heads = metadata.whole(key("attention.head_count"))
    head_dim = metadata.whole(key("attention.key_length"), default=hidden // max(num_heads, 1))
    for other in ("attention.value_length", "rope.dimension_count"):
        if metadata.whole(key(other), default=head_dim) != head_dim:
            raise InvalidModel(f"the GGUF file's {key(other)} isn't the head's {head_dim}")
    max_position = metadata.whole(key("context_length"))
    window = metadata.whole(key("attention.sliding_window"), default=0)
    return {
        "architectures": [_ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "attention_bias": "blk.0.attn_output.bias" in tensor_names,
        "dtype": dtype,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.whole(key("feed_forward_length")),
        "max_position_embeddings": min(max_position, window or max_position),
        "mlp_bias": "blk.0.ffn_down.bias" in tensor_names,
        "num_attention_heads": num_heads,
        "num_experts": metadata.whole(key("expert_count"), default=0),
        "num_hidden_layers": metadata.whole(key("block_count")),
        "num_key_value_heads": metadata.whole(key("attention.head_count_kv"), default=num_heads),
        "rms_norm_eps": metadata.number(key("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(metadata, head_dim=head_dim, divisors=rope_divisors),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "vocab_size": vocab_size,
    }


def _rope(
    metadata: GgufMetadata, *, head_dim: int, divisors: torch.Tensor | None
) -> dict[str, Any]:
    key = metadata.of_architecture
    theta = metadata.number(key("rope.freq_base"), default=10000.0)
    kind = metadata.text(key("rope.scaling.type"), default="none")
    factor = metadata.number(key("rope.scaling.factor"), default=1.0)
    if kind not in {"none", "linear"}:
        raise InvalidModel(
            f"rotary scaling of type {kind!r} isn't supported in GGUF files; supported are none, "
            "linear and Llama 3's"
        )
    scaled = kind == "linear" and factor != 1.0
    if divisors is None:
        if scaled:
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        return {"rope_type": "default", "rope_theta": theta}
    if scaled:
        raise InvalidModel("the GGUF file scales its rotary embedding in two ways at once")
    return _llama3(theta, head_dim=head_dim, divisors=divisors)


def _llama3(theta: float, *, head_dim: int, divisors: torch.Tensor) -> dict[str, Any]:
    """Find the factor that gives these divisors, and check that it gives all of them.

    The file stores only what comes out of Llama 3's stretching; RopeSpec's defaults are its rest.
    """
    factor = float(divisors.max())
    plain = inverse_frequencies(RopeSpec(kind=RopeKind.DEFAULT, theta=theta), head_dim)
    rope = RopeSpec(kind=RopeKind.LLAMA3, theta=theta, factor=factor)
    expected = plain / inverse_frequencies(rope, head_dim)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise InvalidModel(
            "the GGUF file's rotary frequencies (rope_freqs.weight) aren't those of Llama 3; "
            "no other stretching is supported"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
