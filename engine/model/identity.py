"""What makes two bases the same: a digest over weights, format, dtype and rope."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from engine.model.spec import ModelSpec

_FORMAT = 1


class DigestCache:
    """sha256 of whole files, remembered in one JSON file by path, size and time of change.

    A large checkpoint is hashed once (about 2 GB/s) instead of at every start. A cache that can't
    be read or written only costs time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def digest(self, file: Path) -> str:
        """Return the hex sha256 of the content of `file`."""
        stat = file.stat()
        key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        known = self._read()
        if key not in known:
            with file.open("rb") as stream:
                known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
            self._write(known)
        return known[key]

    def _read(self) -> dict[str, str]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict):
            return {}
        return {key: value for key, value in content.items() if isinstance(value, str)}

    def _write(self, known: dict[str, str]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            fresh.write_text(json.dumps(known), encoding="utf-8")
            fresh.replace(self._path)
        except OSError:
            return


def base_identity(spec: ModelSpec, weight_digests: Sequence[str], *, dtype: str) -> str:
    """Return "sha256:…" over the weight files' digests and all that the arithmetic depends on.

    File names and their order don't count; `dtype` is the format that the model runs in.
    """
    description = {
        "format": _FORMAT,
        "weights": sorted(weight_digests),
        "dtype": dtype,
        "spec": _plain(asdict(spec)),
    }
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(canonical).hexdigest()


def digests_of(files: Iterable[Path], cache: DigestCache) -> list[str]:
    """Return each file's digest."""
    return [cache.digest(file) for file in files]


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value
