"""What an archive of any kind looks like to the rest."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol


class Damaged(Exception):
    """The archive's bytes contradict themselves; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One entry of an archive: its name as written, and why it is dangerous, if it is."""

    name: str
    is_file: bool
    danger: str | None = None


class ArchiveReader(Protocol):
    """An open archive: lists its members, then copies single ones out."""

    def members(self) -> Iterator[Member]:
        """List every entry without unpacking it to memory or disk."""

    def copy(self, name: str, target: BinaryIO) -> None:
        """Write the bytes of the file `name` to `target`."""
