"""Brings an upload, an archive or a folder, into a flat folder of the files that are needed."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adapters.archive_reader import ArchiveLimits, Member, open_archive
from adapters.errors import AdapterInvalid, AdapterTooLarge
from adapters.folder import Selection, select_files
from adapters.words import printable

__all__ = ["ArchiveLimits", "UnpackReport", "collect_directory", "unpack"]

_COPY_BYTES = 1 << 20
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackReport:
    """What of an upload was taken, by its flat name, and what was passed over."""

    taken: tuple[str, ...]
    skipped: tuple[str, ...]


def unpack(
    archive: Path, filename_hint: str, destination: Path, *, limits: ArchiveLimits | None = None
) -> UnpackReport:
    """Take the needed files out of a tar, tar.gz or zip into the flat folder `destination`.

    `filename_hint` is the uploader's name for the archive, and only ever shown. Raises
    AdapterInvalid with every reason, or AdapterTooLarge; `destination` may then hold half a file.
    """
    limits = limits or ArchiveLimits()
    with open_archive(archive, limits) as reader:
        names = _member_names(reader.members(), limits)
        selection = _select(names, shown=filename_hint)
        for clean, flat in selection.taken.items():
            with _create(destination / flat) as target:
                reader.copy(names[clean], target)
    return _report(selection)


def collect_directory(
    source: Path, destination: Path, *, limits: ArchiveLimits | None = None
) -> UnpackReport:
    """Copy the needed files of the folder `source`, at any depth, by the same rules."""
    limits = limits or ArchiveLimits()
    found = dict(_walk(source, limits))
    selection = _select(found)
    links = [clean for clean in selection.taken if found[clean].is_symlink()]
    if links:
        raise AdapterInvalid(
            [f"{name} is a link, and links aren't followed: copy the file itself" for name in links]
        )
    total_bytes = 0
    for clean, flat in selection.taken.items():
        with _open_regular(found[clean]) as file, _create(destination / flat) as target:
            while piece := file.read(_COPY_BYTES):
                total_bytes += len(piece)
                if total_bytes > limits.max_total_bytes:
                    raise AdapterTooLarge(
                        f"the adapter's files have more than {limits.max_total_bytes} bytes"
                    )
                target.write(piece)
    return _report(selection)


def _select(names: Iterable[str], shown: str = "") -> Selection:
    selection = select_files(names)
    if selection.problems:
        where = f"{printable(Path(shown).name[:120])}: " if shown else ""
        raise AdapterInvalid([where + problem for problem in selection.problems])
    return selection


def _report(selection: Selection) -> UnpackReport:
    return UnpackReport(taken=tuple(selection.taken.values()), skipped=selection.skipped)


def _member_names(members: Iterator[Member], limits: ArchiveLimits) -> dict[str, str]:
    """Return the files by their clean name; refuse the archive if any entry is dangerous."""
    names: dict[str, str] = {}
    dangers: list[str] = []
    for number, member in enumerate(members, start=1):
        if number > limits.max_members:
            raise AdapterTooLarge(f"the archive has more than {limits.max_members} members")
        danger = member.danger or _name_danger(member.name)
        clean = _clean(member.name)
        if danger is None and member.is_file and clean in names:
            danger = "stands in the archive twice"
        if danger is not None:
            dangers.append(f"{member.name[:200]!r} {danger}")
        elif member.is_file:
            names[clean] = member.name
    if dangers:
        more = len(dangers) - _MAX_NAMED
        raise AdapterInvalid(dangers[:_MAX_NAMED] + ([f"and {more} more"] if more > 0 else []))
    return names


def _clean(name: str) -> str:
    """Return a member's name without empty parts, fit to be shown."""
    return printable("/".join(part for part in name.split("/") if part not in ("", ".")))


def _name_danger(name: str) -> str | None:
    if name.startswith("/") or re.match(r"[A-Za-z]:[/\\]", name):
        return "is an absolute name"
    if ".." in re.split(r"[/\\]", name):
        return "climbs out of the archive with `..`"
    if "\\" in name or "\0" in name:
        return "has a backslash or a zero byte in its name"
    return None


def _walk(source: Path, limits: ArchiveLimits) -> Iterator[tuple[str, Path]]:
    num_entries = 0
    for folder, subfolders, files in os.walk(source, followlinks=False):
        num_entries += len(subfolders) + len(files)
        if num_entries > limits.max_members:
            raise AdapterTooLarge(f"the folder has more than {limits.max_members} entries")
        for name in files:
            path = Path(folder) / name
            yield _clean(path.relative_to(source).as_posix()), path


def _open_regular(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterInvalid([f"{path.name} isn't a regular file"])
    return os.fdopen(descriptor, "rb")


def _create(path: Path) -> BinaryIO:
    return path.open("xb")
