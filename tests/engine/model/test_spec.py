"""config.json in all its dialects becomes one ModelSpec, or a refusal with what is supported."""

from dataclasses import replace
from typing import Any

import pytest

from engine.errors import InvalidModel
from engine.model.spec import ModelSpec, RopeKind, RopeSpec, spec_from_hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


def test_a_plain_llama_has_every_field_filled_in() -> None:
    assert spec_from_hf_config(LLAMA) == ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden=64,
        intermediate=128,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=1000,
        rms_norm_eps=1e-5,
        rope=RopeSpec(kind=RopeKind.DEFAULT, theta=10000.0),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        max_model_len=4096,
        dtype="bf16",
    )


def test_older_and_newer_rope_fields_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    older = spec_from_hf_config(
        {**LLAMA, "rope_theta": 500000, "rope_scaling": {**scaling, "rope_type": "llama3"}}
    )
    newer = spec_from_hf_config(
        {**LLAMA, "rope_parameters": {**scaling, "rope_type": "llama3", "rope_theta": 500000.0}}
    )
    assert older == newer
    assert older.rope == RopeSpec(
        kind=RopeKind.LLAMA3,
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=512,
    )


def test_the_oldest_word_for_linear_scaling_is_understood() -> None:
    spec = spec_from_hf_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert spec.rope == RopeSpec(kind=RopeKind.LINEAR, theta=10000.0, factor=4.0)


def test_dtype_has_two_names_and_may_be_absent() -> None:
    assert spec_from_hf_config({**LLAMA, "dtype": "float16"}).dtype == "fp16"
    assert spec_from_hf_config({**LLAMA, "torch_dtype": "torch.float32"}).dtype == "fp32"
    assert spec_from_hf_config(without(LLAMA, "torch_dtype")).dtype is None


def test_families_fill_in_what_they_leave_unsaid() -> None:
    qwen2 = spec_from_hf_config(without(QWEN2, "max_position_embeddings"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.max_model_len) == (True, False, 32768)
    qwen3 = spec_from_hf_config(QWEN3)
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.qkv_bias) == (True, 128, False)
    assert spec_from_hf_config(without(LLAMA, "num_key_value_heads")).num_kv_heads == 8
    biased = spec_from_hf_config({**LLAMA, "attention_bias": True})
    assert biased == replace(spec_from_hf_config(LLAMA), qkv_bias=True, o_bias=True)


def test_the_model_type_decides_where_no_architecture_is_named() -> None:
    assert spec_from_hf_config(without(LLAMA, "architectures")) == spec_from_hf_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "max_model_len"),
    [
        ({**MISTRAL, "sliding_window": 1024}, 1024),
        ({**MISTRAL, "sliding_window": None}, 4096),
        ({**MISTRAL, "sliding_window": 100_000}, 4096),
        ({**QWEN2, "sliding_window": 1024, "use_sliding_window": False}, 4096),
        ({**QWEN2, "sliding_window": 1024, "use_sliding_window": True}, 1024),
        ({**LLAMA, "sliding_window": 1024}, 4096),
    ],
)
def test_a_window_in_use_caps_the_context(config: dict[str, Any], max_model_len: int) -> None:
    assert spec_from_hf_config(config).max_model_len == max_model_len


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel.*Qwen3"),
        ({"architectures": ["LlamaBiModel"]}, "LlamaBiModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "Mixtral"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "Qwen3Moe"),
        ({"architectures": None, "model_type": None}, "None"),
        ({"model_type": "qwen2"}, "contradicts itself"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq.*Llama.*GGUF"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"num_local_experts": 8}, "experts"),
        ({"hidden_act": "gelu"}, "gelu.*silu"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*linear, llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"num_key_value_heads": 3}, "8 attention heads can't share 3"),
        ({"head_dim": 7}, "odd"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidModel, match=words):
        spec_from_hf_config({**LLAMA, **changes})


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True, None, [], 10**12])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_nonsense_extents_are_refused_with_their_value(key: str, value: Any) -> None:
    with pytest.raises(InvalidModel, match=key):
        spec_from_hf_config({**LLAMA, key: value})


@pytest.mark.parametrize("value", [0, -1e-5, "1e-5", True, float("nan"), float("inf")])
def test_nonsense_numbers_are_refused_with_their_value(value: Any) -> None:
    with pytest.raises(InvalidModel, match="rms_norm_eps"):
        spec_from_hf_config({**LLAMA, "rms_norm_eps": value})


def test_a_flag_that_is_no_flag_is_refused() -> None:
    with pytest.raises(InvalidModel, match="tie_word_embeddings"):
        spec_from_hf_config({**LLAMA, "tie_word_embeddings": "no"})
