"""The canonical digest of an adapter: equal content is one version, however it was packed.

    sha256( format byte
            | for each tensor by name:  name, dtype, shape, bytes
            | for each module by layer and target:  layer, target, lora_rank, lora_scale )

Each text and count is preceded by its length, so that no two contents give the same stream.
"""

import hashlib
import struct
from collections.abc import Iterable
from typing import Protocol

from adapters.manifest import DIGEST_PREFIX
from adapters.peft_format import PeftAdapter, TensorRef

_FORMAT = b"\x01"
_CHUNK_BYTES = 4 << 20


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def adapter_digest(adapter: PeftAdapter) -> str:
    """Return "sha256:" and 64 hex digits over what the adapter does; reads every byte once."""
    digest = hashlib.sha256(_FORMAT)
    tensors = [tensor for lora in adapter.loras for tensor in (lora.a, lora.b)]
    _add_counts(digest, [len(tensors), len(adapter.loras)])
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        _add_tensor(digest, tensor)
    for lora in sorted(adapter.loras, key=lambda lora: (lora.layer, lora.target)):
        _add_text(digest, lora.target)
        _add_counts(digest, [lora.layer, lora.rank])
        digest.update(struct.pack("<d", lora.scale))
    return DIGEST_PREFIX + digest.hexdigest()


def _add_tensor(digest: _Hash, tensor: TensorRef) -> None:
    _add_text(digest, tensor.name)
    _add_text(digest, tensor.dtype)
    _add_counts(digest, [len(tensor.shape), *tensor.shape, tensor.num_bytes])
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        left = tensor.num_bytes
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise OSError(f"the file ended inside {tensor.name}")
            digest.update(chunk)
            left -= len(chunk)


def _add_text(digest: _Hash, text: str) -> None:
    raw = text.encode()
    _add_counts(digest, [len(raw)])
    digest.update(raw)


def _add_counts(digest: _Hash, counts: Iterable[int]) -> None:
    for count in counts:
        digest.update(struct.pack("<Q", count))
