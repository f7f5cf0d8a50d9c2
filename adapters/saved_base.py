"""Whole matrices of the base that PEFT saves beside an adapter: they must be the base's own.

PEFT puts `embed_tokens.base_layer.weight` (or `.weight`) beside a LoRA on the embedding, and the
head's beside a LoRA on the head. If training has left them alone they say nothing; if not, the
adapter is more than its factors. The base description carries a digest of each matrix in each
number format, rounded as a loader would, so that this can be told without the base.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from adapters.base_description import BaseDescription
from adapters.peft_format import TensorRef

_CHUNK_WORDS = 1 << 20


def find_problem(target: str, tensor: TensorRef, base: BaseDescription) -> str | None:
    """Say what keeps a saved matrix of `target` from being the base's own; None if it is."""
    wanted = (base.vocab_size, base.hidden)
    if tensor.shape != wanted:
        return (
            f"{tensor.name} has shape {list(tensor.shape)}, and the base's is {list(wanted)}: the "
            "vocabulary was changed in training, and added tokens aren't served yet"
        )
    known = base.embedding_digests.get(target)
    if not known:
        return (
            f"{tensor.name} is a whole matrix of the base, and {base.base_id} says nothing to "
            "compare it with: start its worker anew, or save the adapter with "
            "save_embedding_layers=False"
        )
    if any(known.get(dtype) == digest for dtype, digest in _digests(tensor)):
        return None
    return (
        f"{tensor.name} isn't the matrix of {base.base_id}: it was trained as a whole, which isn't "
        "served yet, or the adapter was trained on other weights"
    )


def digest_of_words(chunks: Iterable[np.ndarray[Any, Any]]) -> str:
    """Return the digest of a matrix whose raw little-endian words come in pieces."""
    hashed = hashlib.sha256()
    for chunk in chunks:
        hashed.update(np.ascontiguousarray(chunk).data)
    return hashed.hexdigest()


def _digests(tensor: TensorRef) -> Sequence[tuple[str, str]]:
    """Return the digest as stored; for F32 also those of the narrower formats that hold it."""
    words = tensor.read().reshape(-1)
    chunks = [words[i : i + _CHUNK_WORDS] for i in range(0, words.size, _CHUNK_WORDS)]
    found = [(tensor.dtype, digest_of_words(chunks))]
    if tensor.dtype == "F32":
        if not any((chunk.view(np.uint32) & 0xFFFF).any() for chunk in chunks):
            narrow = ((chunk.view(np.uint32) >> 16).astype(np.uint16) for chunk in chunks)
            found.append(("BF16", digest_of_words(narrow)))
        if all(_fits_half(chunk) for chunk in chunks):
            found.append(("F16", digest_of_words(chunk.astype(np.float16) for chunk in chunks)))
    return found


def _fits_half(chunk: np.ndarray[Any, Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool((chunk.astype(np.float16).astype(np.float32) == chunk).all())
