"""Which block holds the K and V of which tokens, after which others, under which weights."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DigestOf = Callable[[bytes, Sequence[int]], bytes]


def kv_root(*, base_identity: str, version: str | None, salt: str) -> bytes:
    """Return the digest in which the chains of one base, adapter version and salt begin.

    K and V are the same only under the same weights, and may be shared only under the same salt.

    version  content digest of the adapter version; None is the base alone
    """
    hasher = hashlib.sha256()
    for part in (base_identity, "" if version is None else f"adapter {version}", salt):
        encoded = part.encode()
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
    return hasher.digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of a full block: of its tokens, and by `parent` of all before them."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What was digested for one block, so that a hit can be checked against it."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class PrefixIndex:
    """Finds full, computed blocks by the chained digest of their tokens; CacheManager's own.

    A digest leads to one block: of two that were computed at once, the first is found. An entry
    outlives the holders of its block, until the block is handed out again. Holds no tensors.
    """

    def __init__(self, digest_of: DigestOf = block_digest) -> None:
        self.digest_of = digest_of
        self._block_ids: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def find(self, digest: bytes, *, parent: bytes, token_ids: Sequence[int]) -> int | None:
        """Return the block of `digest`, if it really holds these tokens after this parent."""
        block_id = self._block_ids.get(digest)
        if block_id is None:
            return None
        entry = self._entries[block_id]
        if entry.parent != parent or entry.token_ids != tuple(token_ids):
            return None
        return block_id

    def publish(
        self, block_id: int, digest: bytes, *, parent: bytes, token_ids: Sequence[int]
    ) -> None:
        """Make a block findable, unless another is under the same digest already."""
        assert block_id not in self._entries, f"block {block_id} is published already"
        if digest not in self._block_ids:
            self._block_ids[digest] = block_id
            self._entries[block_id] = _Entry(
                digest=digest, parent=parent, token_ids=tuple(token_ids)
            )

    def forget(self, block_id: int) -> None:
        """Make a block unfindable: it is about to be written, or its content is in doubt."""
        entry = self._entries.pop(block_id, None)
        if entry is not None:
            del self._block_ids[entry.digest]

    def check_invariants(self) -> None:
        """Check that digests and blocks lead to each other."""
        by_digest = {entry.digest: block_id for block_id, entry in self._entries.items()}
        assert by_digest == self._block_ids, "digests and blocks disagree"
