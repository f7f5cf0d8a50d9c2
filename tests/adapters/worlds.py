"""The smallest worlds that adapters can live in: a tiny base, and adapters written by hand."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.base_description import PARENT_OF_TARGET, BaseDescription, LinearShape

HIDDEN, KV, MLP, NUM_LAYERS = 16, 8, 24, 2

TINY_MODULES = {
    "q_proj": LinearShape(in_features=HIDDEN, out_features=HIDDEN),
    "k_proj": LinearShape(in_features=HIDDEN, out_features=KV),
    "v_proj": LinearShape(in_features=HIDDEN, out_features=KV),
    "o_proj": LinearShape(in_features=HIDDEN, out_features=HIDDEN),
    "gate_proj": LinearShape(in_features=HIDDEN, out_features=MLP),
    "up_proj": LinearShape(in_features=HIDDEN, out_features=MLP),
    "down_proj": LinearShape(in_features=MLP, out_features=HIDDEN),
}


def tiny_base(**changes: Any) -> BaseDescription:
    fields: dict[str, Any] = {
        "base_id": "tiny",
        "identity": "sha256:" + "ab" * 32,
        "architecture": "LlamaForCausalLM",
        "num_layers": NUM_LAYERS,
        "hidden": HIDDEN,
        "vocab_size": 64,
        "max_model_len": 128,
        "tie_word_embeddings": True,
        "modules": TINY_MODULES,
    }
    return BaseDescription(**(fields | changes))


def config(**changes: Any) -> dict[str, Any]:
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
    }
    return fields | changes


def tensor_name(layer: int, target: str, side: str, root: str = "model.") -> str:
    parent = PARENT_OF_TARGET[target]
    return f"base_model.model.{root}layers.{layer}.{parent}.{target}.lora_{side}.weight"


def tensors(
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    *,
    rank: int = 4,
    layers: range = range(NUM_LAYERS),
    root: str = "model.",
    seed: int = 0,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    result = {}
    for layer in layers:
        for target in targets:
            shape = TINY_MODULES[target]
            a = rng.standard_normal((rank, shape.in_features), dtype=np.float32)
            b = rng.standard_normal((shape.out_features, rank), dtype=np.float32)
            result[tensor_name(layer, target, "A", root)] = a
            result[tensor_name(layer, target, "B", root)] = b
    return result


def safetensors_bytes(arrays: Mapping[str, np.ndarray], dtype: str = "F32") -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in arrays.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    return with_header(header, body)


def with_header(header: Any, body: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + body


def write_adapter(
    folder: Path,
    fields: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields or config()))
    (folder / "adapter_model.safetensors").write_bytes(
        safetensors_bytes(tensors() if arrays is None else arrays)
    )
    return folder
