"""Brings an upload, an archive or a folder, into a flat folder of the files that are needed."""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adapters.archive_reader import open_archive
from adapters.errors import AdapterInvalid
from adapters.folder import Selection, select_files
from adapters.limits import UploadLimits
from adapters.members import Member
from adapters.meter import Meter
from adapters.words import printable

_COPY_BYTES = 1 << 20
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackReport:
    """What of an upload was taken, by its flat name, and what was passed over."""

    taken: tuple[str, ...]
    skipped: tuple[str, ...]


def unpack(
    archive: Path, filename_hint: str, destination: Path, *, limits: UploadLimits | None = None
) -> UnpackReport:
    """Take the needed files out of a tar, tar.gz or zip into the flat folder `destination`.

    `filename_hint` is the uploader's name for the archive, and only ever shown. Raises
    AdapterInvalid with every reason, or AdapterTooLarge; `destination` may then hold half a file.
    """
    limits = limits or UploadLimits()
    with _open_regular(archive, shown="the archive") as file:
        meter = Meter(limits, packed_bytes=os.fstat(file.fileno()).st_size)
    with open_archive(archive, meter, limits) as reader:
        names = _member_names(reader.members(), meter)
        selection = _select(names, shown=filename_hint)
        for clean, flat in selection.taken.items():
            with _create(destination / flat) as target:
                reader.copy(names[clean], target)
    return _report(selection)


def collect_directory(
    source: Path, destination: Path, *, limits: UploadLimits | None = None
) -> UnpackReport:
    """Copy the needed files of the folder `source`, at any depth, by the same rules."""
    meter = Meter(limits or UploadLimits())
    found = dict(_walk(source, meter))
    selection = _select(found)
    links = [clean for clean in selection.taken if found[clean].is_symlink()]
    if links:
        raise AdapterInvalid(
            [f"{name} is a link, and links aren't followed: copy the file itself" for name in links]
        )
    for clean, flat in selection.taken.items():
        with _open_regular(found[clean], shown=clean) as file, _create(destination / flat) as out:
            while piece := file.read(_COPY_BYTES):
                meter.count(len(piece))
                out.write(piece)
    return _report(selection)


def move_files(found: Mapping[str, Path], destination: Path) -> UnpackReport:
    """Move the needed files among `found`, by the names that the uploader gave them."""
    selection = _select(found)
    for clean, flat in selection.taken.items():
        found[clean].replace(destination / flat)
    return _report(selection)


def _select(names: Iterable[str], shown: str = "") -> Selection:
    selection = select_files(names)
    if selection.problems:
        where = f"{printable(Path(shown).name[:120])}: " if shown else ""
        raise AdapterInvalid([where + problem for problem in selection.problems])
    return selection


def _report(selection: Selection) -> UnpackReport:
    return UnpackReport(taken=tuple(selection.taken.values()), skipped=selection.skipped)


def _member_names(members: Iterator[Member], meter: Meter) -> dict[str, str]:
    """Return the files by their clean name; refuse the archive if any entry is dangerous."""
    names: dict[str, str] = {}
    dangers: list[str] = []
    for member in members:
        meter.count_member()
        danger = member.danger or _name_danger(member.name)
        clean = _clean(member.name)
        if danger is None and member.is_file and clean in names:
            danger = "stands in the archive twice"
        if danger is not None:
            dangers.append(f"{printable(member.name[:200])!r} {danger}")
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


def _walk(source: Path, meter: Meter) -> Iterator[tuple[str, Path]]:
    for folder, subfolders, files in os.walk(source, followlinks=False):
        for _ in subfolders:
            meter.count_member()
        for name in files:
            meter.count_member()
            path = Path(folder) / name
            yield _clean(path.relative_to(source).as_posix()), path


def _open_regular(path: Path, *, shown: str) -> BinaryIO:
    """Open a file for reading, or refuse it by the name that the uploader knows it by."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise AdapterInvalid([f"{shown} can't be opened: {error.strerror}"]) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterInvalid([f"{shown} isn't a regular file"])
    return os.fdopen(descriptor, "rb")


def _create(path: Path) -> BinaryIO:
    return path.open("xb")
