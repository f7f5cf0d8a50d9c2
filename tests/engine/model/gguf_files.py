"""Tiny GGUF files out of transformers' models, laid out the way llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Return `size` tokens and their types: three control tokens, one merged, then single bytes."""
    tokens = ["<|pad|>", "<|begin|>", "<|end|>", "ab", *sorted(ByteLevel.alphabet())][:size]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (size - 3)
    return tokens, types


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave each head's halves, as the converter does for the llama architecture."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    keys: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Path:
    """Write `model`; `keys` replace metadata (None leaves a key out), matrices are quantised."""
    config = model.config
    arch = architecture or config.model_type
    writer = gguf.GGUFWriter(path, arch)
    tokens, types = vocabulary(config.vocab_size)
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": model.model.layers[0].self_attn.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **(keys or {}),
    }
    for key, value in metadata.items():
        _add_key(writer, key, value)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if arch == "llama" and "q_proj" in name:
            values = permuted(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = permuted(values, config.num_key_value_heads)
        kind = quantisation if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    module, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{_PARTS[module]}.{kind}"


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case [int(), *_]:
            writer.add_array(key, value)
        case _:
            writer.add_key_value(
                key, value, gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.STRING
            )
