"""What a Llama-family checkpoint says of itself, checked, with every default filled in."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.errors import InvalidModel

SUPPORTED = "Llama 2 and 3, Mistral, Qwen2 and 2.5, Qwen3, SmolLM2 (dense, fp32, fp16 or bf16)"

# Extents and epsilons that a size can have; beyond these a config is nonsense, not a model.
_MAX_EXTENT = 2**31 - 1


class RopeKind(Enum):
    """How rotary frequencies are stretched; the value is config.json's word for it."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding of one model; the last three count for LLAMA3 only."""

    kind: RopeKind
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder of the Llama family; everything that its arithmetic depends on.

    architecture   config.json's name of it, e.g. "LlamaForCausalLM"
    dtype          "fp32", "fp16" or "bf16" as the checkpoint says; None if it says nothing
    max_model_len  tokens of prompt and answer that it was made for. A checkpoint with a sliding
                   window is capped at the window, so that the window never matters
    """

    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_model_len: int
    dtype: str | None

    @property
    def q_features(self) -> int:
        """Columns of q in the packed q|k|v product."""
        return self.num_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Columns of k, and of v, in the packed q|k|v product."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What one architecture leaves unsaid in config.json."""

    model_type: str
    max_position: int
    head_dim: int | None = None
    reads_attention_bias: bool = False
    always_qkv_bias: bool = False
    qk_norm: bool = False
    window_needs_switch: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(model_type="llama", max_position=2048, reads_attention_bias=True),
    "MistralForCausalLM": _Family(model_type="mistral", max_position=131072),
    "Qwen2ForCausalLM": _Family(
        model_type="qwen2", max_position=32768, always_qkv_bias=True, window_needs_switch=True
    ),
    "Qwen3ForCausalLM": _Family(
        model_type="qwen3",
        max_position=32768,
        head_dim=128,
        reads_attention_bias=True,
        qk_norm=True,
        window_needs_switch=True,
    ),
}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def spec_from_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec that a Hugging Face config.json describes.

    Reads older files (rope_theta, rope_scaling, torch_dtype) and newer ones (rope_parameters,
    dtype). Raises InvalidModel naming what is unsupported and what is supported.
    """
    architecture = _architecture_of(config)
    family = _FAMILIES[architecture]
    _refuse_what_changes_the_arithmetic(config)
    num_heads = _extent(config, "num_attention_heads")
    hidden = _extent(config, "hidden_size")
    head_dim = _extent(config, "head_dim", default=family.head_dim or hidden // num_heads)
    num_kv_heads = _extent(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise InvalidModel(
            f"config.json: {num_heads} attention heads can't share {num_kv_heads} key-value heads"
        )
    if head_dim % 2:
        raise InvalidModel(f"config.json: head_dim {head_dim} is odd, so it can't be rotated")
    max_position = _extent(config, "max_position_embeddings", default=family.max_position)
    attention_bias = family.reads_attention_bias and _flag(config, "attention_bias")
    return ModelSpec(
        architecture=architecture,
        num_layers=_extent(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_extent(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_extent(config, "vocab_size"),
        rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope=_rope_of(config, max_position=max_position),
        qkv_bias=family.always_qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and _flag(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        max_model_len=min(max_position, _window_of(config, family) or max_position),
        dtype=_DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).split(".")[-1]),
    )


def _architecture_of(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    model_type = config.get("model_type")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        architecture = named[0]
    else:
        by_type = {family.model_type: name for name, family in _FAMILIES.items()}
        architecture = by_type.get(str(model_type), str(model_type))
    family = _FAMILIES.get(architecture)
    if family is None:
        raise InvalidModel(
            f"the architecture {architecture!r} isn't supported; supported are {SUPPORTED}"
        )
    if model_type not in {None, family.model_type}:
        raise InvalidModel(
            f"config.json contradicts itself: architecture {architecture!r}, but model_type "
            f"{model_type!r} (expected {family.model_type!r})"
        )
    return architecture


def _refuse_what_changes_the_arithmetic(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise InvalidModel(
            f"checkpoints quantised by {method or 'an unnamed method'} aren't supported; "
            f"supported are {SUPPORTED}, and GGUF files"
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise InvalidModel(
                f"mixtures of experts ({key}={config[key]!r}) aren't supported; "
                f"supported are {SUPPORTED}"
            )
    activation = config.get("hidden_act", "silu")
    if activation not in {"silu", "swish"}:
        raise InvalidModel(f"hidden_act {activation!r} isn't supported; supported is 'silu'")
    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict) and any("Model" in str(key) for key in auto_map):
        raise InvalidModel(
            "the checkpoint brings model code of its own (auto_map), which is never run; "
            f"supported are {SUPPORTED}"
        )


def _window_of(config: Mapping[str, Any], family: _Family) -> int | None:
    """Return the sliding window that some layer uses, or None if all attend to everything."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise InvalidModel(f"config.json: layer_types isn't a list: {layer_types!r}")
        unknown = {str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"}
        if unknown:
            raise InvalidModel(
                f"layers of type {', '.join(sorted(unknown))} aren't supported; supported are "
                "full_attention and sliding_attention"
            )
    if family.model_type == "llama":
        return None
    if family.window_needs_switch and not _flag(config, "use_sliding_window"):
        return None
    if config.get("sliding_window") is None:
        return None
    return _extent(config, "sliding_window")


def _rope_of(config: Mapping[str, Any], *, max_position: int) -> RopeSpec:
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidModel(f"config.json: rope parameters aren't an object: {parameters!r}")
    merged: dict[str, Any] = {
        "rope_theta": config.get("rope_theta", 10000.0),
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": config.get(
            "original_max_position_embeddings", max_position
        ),
        **{key: value for key, value in parameters.items() if value is not None},
    }
    name = merged.get("rope_type", merged.get("type", "default"))
    kinds = {kind.value: kind for kind in RopeKind}
    if name not in kinds:
        raise InvalidModel(
            f"rotary scaling of type {name!r} isn't supported; supported are {', '.join(kinds)}"
        )
    if _number(merged, "partial_rotary_factor") != 1.0:
        raise InvalidModel("partial rotary embedding isn't supported: the whole head must rotate")
    theta = _number(merged, "rope_theta")
    if kinds[name] is RopeKind.DEFAULT:
        return RopeSpec(kind=RopeKind.DEFAULT, theta=theta)
    if kinds[name] is RopeKind.LINEAR:
        return RopeSpec(kind=RopeKind.LINEAR, theta=theta, factor=_number(merged, "factor"))
    return RopeSpec(
        kind=RopeKind.LLAMA3,
        theta=theta,
        factor=_number(merged, "factor"),
        low_freq_factor=_number(merged, "low_freq_factor"),
        high_freq_factor=_number(merged, "high_freq_factor"),
        original_max_position=_extent(merged, "original_max_position_embeddings"),
    )


def _extent(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_EXTENT:
        raise InvalidModel(f"config.json: {key} must be a positive whole number, not {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise InvalidModel(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidModel(f"config.json: {key} must be true or false, not {value!r}")
    return value
