"""Reads zip through its table of contents, once that is known to be of a sane size."""

import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from adapters.errors import AdapterTooLarge
from adapters.limits import MAX_MEMBER_NAME_BYTES, UploadLimits
from adapters.members import Damaged, Member
from adapters.meter import Meter

_READ_BYTES = 1 << 20
# Of one member in the table of contents, its name and extra fields with it.
_MAX_ENTRY_BYTES = 256
_END = struct.Struct("<4s4H2LH")
_ZIP64_LOCATOR = struct.Struct("<4sLQL")
_ZIP64_END = struct.Struct("<4sQ2H2L4Q")


class ZipArchive:
    """A zip; raises AdapterTooLarge before a table of contents is read that no real one has."""

    def __init__(self, path: Path, meter: Meter, limits: UploadLimits) -> None:
        _check_directory_size(path, limits)
        self._path = path
        self._meter = meter

    def members(self) -> Iterator[Member]:
        with zipfile.ZipFile(self._path) as archive:
            for info in archive.infolist():
                # `filename` ends at a zero byte; what was written doesn't.
                yield Member(
                    name=info.orig_filename, is_file=not info.is_dir(), danger=_danger(info)
                )

    def copy(self, name: str, target: BinaryIO) -> None:
        with zipfile.ZipFile(self._path) as archive, archive.open(name) as source:
            while piece := source.read(_READ_BYTES):
                self._meter.count(len(piece))
                target.write(piece)


def _danger(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    num_name_bytes = len(info.orig_filename.encode(errors="surrogatepass"))
    if kind == stat.S_IFLNK:
        return "is a link; links aren't followed"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a device or a pipe"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is packed by a method other than deflate"
    if num_name_bytes > MAX_MEMBER_NAME_BYTES:
        return f"has a name of {num_name_bytes} bytes; at most {MAX_MEMBER_NAME_BYTES} are read"
    return None


def _check_directory_size(path: Path, limits: UploadLimits) -> None:
    max_bytes = limits.max_members * _MAX_ENTRY_BYTES
    num_bytes = _directory_bytes(path)
    if num_bytes > max_bytes:
        raise AdapterTooLarge(
            f"the archive's table of contents has {num_bytes} bytes; {max_bytes} are enough for "
            f"{limits.max_members} members"
        )


def _directory_bytes(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - (1 << 16) - _END.size - _ZIP64_LOCATOR.size))
        tail = file.read()
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or len(tail) - at < _END.size:
            raise Damaged("it has no end record, so it is truncated")
        num_bytes: int = _END.unpack_from(tail, at)[5]
        locator_at = at - _ZIP64_LOCATOR.size
        if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
            file.seek(_ZIP64_LOCATOR.unpack_from(tail, locator_at)[2])
            num_bytes = max(num_bytes, _zip64_directory_bytes(file))
    return num_bytes


def _zip64_directory_bytes(file: BinaryIO) -> int:
    raw = file.read(_ZIP64_END.size)
    if len(raw) < _ZIP64_END.size or not raw.startswith(b"PK\x06\x06"):
        raise Damaged("its zip64 end record is missing")
    num_bytes: int = _ZIP64_END.unpack(raw)[8]
    return num_bytes
