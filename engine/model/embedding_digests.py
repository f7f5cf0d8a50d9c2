"""Digests of a checkpoint's embedding and head, by which an adapter's copies of them are known."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.saved_base import digest_of_words
from engine.model.checkpoint import Checkpoint
from engine.model.spec import ModelSpec

_CHUNK_ROWS = 4096
_FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

EmbeddingDigests = dict[str, dict[str, str]]


def embedding_digests(
    checkpoint: Checkpoint, spec: ModelSpec, *, file_digests: Sequence[str], cache: Path
) -> EmbeddingDigests:
    """Return the digests of BaseDescription.embedding_digests, computed once per checkpoint.

    cache is a JSON file that remembers them by the digests of the checkpoint's files.
    """
    key = hashlib.sha256("|".join(sorted(file_digests)).encode()).hexdigest()
    known = _read(cache)
    found = known.get(key)
    if found is None:
        embedding = _of_tensor(checkpoint, "model.embed_tokens.weight")
        is_tied = spec.tie_word_embeddings
        head = embedding if is_tied else _of_tensor(checkpoint, "lm_head.weight")
        found = known[key] = {"embed_tokens": embedding, "lm_head": head}
        _write(cache, known)
    return found


def _of_tensor(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    values = torch.empty(checkpoint.shape(name), dtype=_FORMATS[_stored(checkpoint, name)])
    checkpoint.copy_into(values, name)
    return {label: digest_of_words(_words(values, dtype)) for label, dtype in _FORMATS.items()}


def _stored(checkpoint: Checkpoint, name: str) -> str:
    return {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[checkpoint.dtype(name)]


def _words(values: torch.Tensor, dtype: torch.dtype) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the raw words of `values` in another format, some rows at a time."""
    words = torch.int32 if dtype.itemsize == 4 else torch.int16
    for start in range(0, values.shape[0], _CHUNK_ROWS):
        yield values[start : start + _CHUNK_ROWS].to(dtype).view(words).numpy()


def _read(cache: Path) -> dict[str, EmbeddingDigests]:
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(cache: Path, known: dict[str, EmbeddingDigests]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        fresh = cache.with_name(f"{cache.name}.{os.getpid()}")
        fresh.write_text(json.dumps(known), encoding="utf-8")
        fresh.replace(cache)
    except OSError:
        return
