"""Lays a GGUF file out, once, as a Hugging Face directory that everything else can load."""

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from engine.errors import InvalidModel
from engine.model.gguf_config import hf_config
from engine.model.gguf_metadata import GgufMetadata
from engine.model.gguf_tokenizer import (
    as_json,
    generation_config,
    tokenizer_config,
    tokenizer_json,
)
from engine.model.identity import DigestCache
from engine.model.safetensors_writer import TensorPlan, write_safetensors

# Raised whenever the same GGUF file would be laid out differently.
_LAYOUT_VERSION = 1

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


def convert_gguf(path: Path, *, models_dir: Path, progress: Callable[[str], None]) -> Path:
    """Return a directory below `models_dir` with the same model; made if it isn't there yet.

    Named by the file's content, and put in place by one rename, so that a reader never sees half
    of it. Quantised tensors become fp32, floats keep their format; q and k rows, which GGUF
    stores in the order of interleaved rotation, are put back into the order of two halves.
    Raises InvalidModel in words.
    """
    digest = DigestCache(models_dir / "digests.json").digest(path)
    key = hashlib.sha256(f"{_LAYOUT_VERSION}:{digest}".encode()).hexdigest()[:12]
    directory = models_dir / key
    if directory.is_dir():
        return directory
    with _words_for(path), _only_converter(models_dir, key):
        if not directory.is_dir():
            progress(f"converting {path.name} (once)")
            _remove_leftovers(models_dir, key)
            staging = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=models_dir))
            try:
                _write_directory(path, staging)
                staging.rename(directory)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return directory


def unpermuted(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Return q or k rows with each head's two halves after each other.

    GGUF interleaves them: row 2i of a head is row i of its first half, row 2i + 1 of its second.
    """
    halves = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceTensor:
    """One tensor of the file; `num_permuted_heads` is 0 where rows keep their order."""

    tensor: Any
    num_permuted_heads: int

    @property
    def kind(self) -> str:
        return str(self.tensor.tensor_type.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(extent) for extent in reversed(self.tensor.shape))

    def values(self) -> npt.NDArray[Any]:
        if self.kind == "BF16":
            values = np.frombuffer(self.tensor.data.tobytes(), dtype=np.uint16)
        elif self.kind in _FLOATS:
            values = self.tensor.data
        else:
            values = gguf.quants.dequantize(self.tensor.data, self.tensor.tensor_type)
        values = values.reshape(self.shape)
        if self.num_permuted_heads:
            values = unpermuted(values, self.num_permuted_heads)
        return np.ascontiguousarray(values)


def _write_directory(path: Path, directory: Path) -> None:
    reader = gguf.GGUFReader(path)
    metadata = GgufMetadata({key: field.contents() for key, field in reader.fields.items()})
    if metadata.whole("split.count", default=1) > 1:
        raise InvalidModel(f"{path.name} is one part of several; merge them into one file")
    config = _config(metadata, reader.tensors)
    max_model_len = config["max_position_embeddings"]
    texts = {
        "config.json": as_json(config),
        "generation_config.json": as_json(generation_config(metadata)),
        "tokenizer.json": tokenizer_json(metadata),
        "tokenizer_config.json": as_json(tokenizer_config(metadata, max_model_len=max_model_len)),
    }
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    plans = [
        TensorPlan(
            name=name,
            dtype=_FLOATS.get(source.kind, "F32"),
            shape=source.shape,
            values=source.values,
        )
        for name, source in _sources(reader.tensors, config).items()
    ]
    write_safetensors(directory / "model.safetensors", plans)


def _config(metadata: GgufMetadata, tensors: list[Any]) -> dict[str, Any]:
    by_name = {tensor.name: tensor for tensor in tensors}
    if "token_embd.weight" not in by_name:
        raise InvalidModel("the GGUF file has no token_embd.weight")
    vocab_size = int(by_name["token_embd.weight"].shape[1])
    num_tokens = len(metadata.items("tokenizer.ggml.tokens"))
    if num_tokens > vocab_size:
        raise InvalidModel(
            f"the GGUF file's tokenizer has {num_tokens} tokens, its embedding only {vocab_size}"
        )
    kinds = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    dtype = {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(
        frozenset(kinds), "bfloat16"
    )
    divisors = by_name.get(_ROPE_FREQS)
    return hf_config(
        metadata,
        vocab_size=vocab_size,
        tensor_names=frozenset(by_name),
        rope_divisors=None if divisors is None else torch.from_numpy(divisors.data.copy()),
        dtype=dtype,
    )


def _sources(tensors: list[Any], config: dict[str, Any]) -> dict[str, _SourceTensor]:
    permuted = {}
    if config["model_type"] == "llama":
        permuted = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
    sources = {}
    for tensor in tensors:
        if tensor.name == _ROPE_FREQS:
            continue
        name = _hf_name(tensor.name)
        if name is None:
            raise InvalidModel(f"the GGUF file's tensor {tensor.name} is of no supported model")
        part = tensor.name.split(".")[-2]
        sources[name] = _SourceTensor(tensor=tensor, num_permuted_heads=permuted.get(part, 0))
    return sources


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight" | "bias" as kind] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
    return None


@contextmanager
def _only_converter(models_dir: Path, key: str) -> Iterator[None]:
    """Hold the lock of one file's conversion; who comes second finds the result."""
    models_dir.mkdir(parents=True, exist_ok=True)
    with (models_dir / f".{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, or by our death
        yield


def _remove_leftovers(models_dir: Path, key: str) -> None:
    """Remove what conversions that were killed have left; the caller holds the lock."""
    for leftover in models_dir.glob(f".{key}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _words_for(path: Path) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise InvalidModel(f"{path.name} has tensors that can't be dequantised: {error}") from error
    except (ValueError, IndexError, KeyError) as error:
        raise InvalidModel(f"{path.name} can't be read as GGUF: {error}") from error
    except OSError as error:
        raise InvalidModel(f"{path.name} can't be converted: {error.strerror}") from error
