"""What was published, promoted and retired, line by line on the disk.

The registry can be rebuilt from it. An entry is appended before the registry is asked to change;
one that the registry then refused is followed by a line that withdraws it.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from adapters.record import AdapterRecord


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line: the record as it is to be, or, with `withdraws`, the id of a line to ignore."""

    entry_id: str
    created: str
    record: AdapterRecord | None = None
    actor: str = ""
    action: str = ""
    withdraws: str = ""


class Journal:
    """An append-only file of JSON lines. Several processes may append; each line is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, entry: JournalEntry) -> None:
        """Add a line and return when it is on the disk."""
        line = msgspec.json.encode(entry) + b"\n"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _ends_with_newline(descriptor):
                line = b"\n" + line
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self) -> list[JournalEntry]:
        """Return every whole entry that wasn't withdrawn; a torn line is passed over."""
        entries = list(self._entries())
        withdrawn = {entry.withdraws for entry in entries}
        return [e for e in entries if e.record is not None and e.entry_id not in withdrawn]

    def latest_records(self) -> dict[str, AdapterRecord]:
        """Return the newest record of each name; of equal generations the later line."""
        latest: dict[str, AdapterRecord] = {}
        for entry in self.read():
            record = entry.record
            assert record is not None
            known = latest.get(record.name)
            if known is None or record.generation >= known.generation:
                latest[record.name] = record
        return latest

    def _entries(self) -> Iterator[JournalEntry]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            for line in file:
                try:
                    yield msgspec.json.decode(line, type=JournalEntry)
                except msgspec.MsgspecError:
                    # A crash tore it while it was being written, so nobody was told it is there.
                    continue


def _ends_with_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
