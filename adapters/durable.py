"""Files that survive a crash: written beside, flushed to the disk, then renamed."""

import os
import uuid
from pathlib import Path


def sync_file(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`: a reader sees the old file or the whole new one, also after a crash."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_file(path.parent)
