"""Reads tar, tar.gz and zip member by member, within limits, and refuses what is dangerous.

Nothing here writes a file whose name an archive has chosen.
"""

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from adapters.errors import AdapterInvalid, AdapterTooLarge

_READ_BYTES = 1 << 20
# A header's own text (long names, pax records) is read in one piece; members aren't.
_MAX_ONE_READ_BYTES = 4 << 20
_KEPT_BYTES = 1 << 10
_ZIP_END = struct.Struct("<4s4H2LH")
_ZIP64_LOCATOR = struct.Struct("<4sLQL")
_ZIP64_END = struct.Struct("<4sQ2H2L4Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLimits:
    """What an upload may cost before it is refused.

    max_total_bytes   unpacked bytes that are read or written
    max_members       files and folders in the archive, skipped ones too
    max_ratio         unpacked to packed bytes, asked only above ratio_free_bytes
    """

    max_total_bytes: int = 8 << 30
    max_members: int = 20_000
    max_ratio: int = 100
    ratio_free_bytes: int = 64 << 20


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


@contextmanager
def open_archive(path: Path, limits: ArchiveLimits) -> Iterator[ArchiveReader]:
    """Open an archive by what is in it, not by its name.

    Raises AdapterInvalid for other formats and for damaged files, AdapterTooLarge past a limit.
    """
    with path.open("rb") as file:
        start = file.read(512)
    try:
        yield _reader(path, start, limits)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise AdapterInvalid([f"the archive is damaged: {error}"]) from error
    except (RuntimeError, ValueError, LookupError, OverflowError, struct.error) as error:
        raise AdapterInvalid([f"the archive can't be read: {error}"]) from error


def _reader(path: Path, start: bytes, limits: ArchiveLimits) -> ArchiveReader:
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _ZipArchive(path, limits)
    if start.startswith(b"\x1f\x8b"):
        return _TarArchive(path, limits, open_stream=_open_gzip)
    if start[257:262] == b"ustar" or start == bytes(512):
        return _TarArchive(path, limits, open_stream=_open_plain)
    for magic, kind in (
        (b"BZh", "bzip2"),
        (b"\xfd7zXZ", "xz"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"7z\xbc\xaf", "7z"),
        (b"Rar!", "rar"),
    ):
        if start.startswith(magic):
            raise AdapterInvalid([f"{kind} archives aren't read: use tar, tar.gz or zip"])
    raise AdapterInvalid(["the file is no archive that is read here: use tar, tar.gz or zip"])


def _open_gzip(path: Path) -> BinaryIO:
    return gzip.open(path, "rb")  # type: ignore[return-value]


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


class _Meter:
    """Counts unpacked bytes and refuses the one too many."""

    def __init__(self, packed_bytes: int, limits: ArchiveLimits) -> None:
        self._limits = limits
        self._packed_bytes = max(1, packed_bytes)
        self._total_bytes = 0

    def count(self, num_bytes: int) -> None:
        self._total_bytes += num_bytes
        limits = self._limits
        if self._total_bytes > limits.max_total_bytes:
            raise AdapterTooLarge(
                f"the archive unpacks to more than {limits.max_total_bytes} bytes"
            )
        ratio_bytes = max(limits.ratio_free_bytes, self._packed_bytes * limits.max_ratio)
        if self._total_bytes > ratio_bytes:
            raise AdapterTooLarge(
                f"the archive of {self._packed_bytes} bytes unpacks to more than {ratio_bytes}, "
                f"{limits.max_ratio} times its size: it looks like a decompression bomb"
            )


class _MeteredStream(io.RawIOBase):
    """A forward-only view of an unpacked stream, as tarfile wants it: bounded and counted.

    Steps back over the last bytes are served from memory, so that tarfile's look at the byte
    before a header doesn't unpack everything again.
    """

    def __init__(self, stream: BinaryIO, meter: _Meter) -> None:
        self._stream = stream
        self._meter = meter
        self._position = 0
        self._end = 0
        self._kept = b""

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0
        if offset < self._end - len(self._kept):
            raise tarfile.ReadError("its entries don't follow one another")
        while offset > self._end and self._pull(min(offset - self._end, _READ_BYTES)):
            pass
        self._position = min(offset, self._end)
        return self._position

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _MAX_ONE_READ_BYTES:
            raise tarfile.ReadError("an entry's header is longer than any real one")
        behind = self._end - self._position
        from_kept = self._kept[len(self._kept) - behind :][:size] if behind else b""
        pieces = [from_kept]
        left = size - len(from_kept)
        while left:
            piece = self._pull(left)
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
        data = b"".join(pieces)
        self._position += len(data)
        return data

    def _pull(self, size: int) -> bytes:
        piece = self._stream.read(size)
        self._meter.count(len(piece))
        self._end += len(piece)
        self._kept = (self._kept + piece)[-_KEPT_BYTES:]
        return piece


class _TarArchive:
    """A tar, read from its start for every look: no index is trusted."""

    def __init__(
        self, path: Path, limits: ArchiveLimits, *, open_stream: Callable[[Path], BinaryIO]
    ) -> None:
        self._path = path
        self._limits = limits
        self._open_stream = open_stream

    def members(self) -> Iterator[Member]:
        for _, info in self._walk():
            yield Member(name=info.name, is_file=info.isreg(), danger=_tar_danger(info))

    def copy(self, name: str, target: BinaryIO) -> None:
        for archive, info in self._walk():
            if info.name == name and info.isreg():
                source = archive.extractfile(info)
                assert source is not None
                _copy(source, target, num_bytes=info.size)
                return
        raise AdapterInvalid([f"the archive is damaged: {name[:200]!r} has gone"])

    def _walk(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        meter = _Meter(self._path.stat().st_size, self._limits)
        with self._open_stream(self._path) as stream:
            metered: IO[bytes] = _MeteredStream(stream, meter)  # type: ignore[assignment]
            with tarfile.open(fileobj=metered, mode="r:", errorlevel=2) as archive:
                while (info := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]
                    yield archive, info


def _tar_danger(info: tarfile.TarInfo) -> str | None:
    if info.issym() or info.islnk():
        return f"is a link to {info.linkname[:120]!r}; links aren't followed"
    if info.issparse():
        return "is a sparse file"
    if not (info.isreg() or info.isdir()):
        return "is a device or a pipe"
    return None


class _ZipArchive:
    """A zip, read through its central directory."""

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        _check_directory_size(path, limits)
        self._path = path
        self._meter = _Meter(path.stat().st_size, limits)

    def members(self) -> Iterator[Member]:
        with zipfile.ZipFile(self._path) as archive:
            for info in archive.infolist():
                yield Member(
                    name=info.filename, is_file=not info.is_dir(), danger=_zip_danger(info)
                )

    def copy(self, name: str, target: BinaryIO) -> None:
        with zipfile.ZipFile(self._path) as archive, archive.open(name) as source:
            while piece := source.read(_READ_BYTES):
                self._meter.count(len(piece))
                target.write(piece)


def _zip_danger(info: zipfile.ZipInfo) -> str | None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind == stat.S_IFLNK:
        return "is a link; links aren't followed"
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a device or a pipe"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is packed by a method other than deflate"
    return None


def _check_directory_size(path: Path, limits: ArchiveLimits) -> None:
    """Refuse a central directory that would cost more memory than any real upload's."""
    max_bytes = limits.max_members * 256
    num_bytes = _central_directory_bytes(path)
    if num_bytes > max_bytes:
        raise AdapterTooLarge(
            f"the archive's table of contents has {num_bytes} bytes; {max_bytes} are enough for "
            f"{limits.max_members} members"
        )


def _central_directory_bytes(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = max(0, size - (1 << 16) - _ZIP_END.size)
        file.seek(start)
        tail = file.read()
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or len(tail) - at < _ZIP_END.size:
            raise zipfile.BadZipFile("it has no end record, so it is truncated")
        num_bytes: int = _ZIP_END.unpack_from(tail, at)[5]
        locator_at = at - _ZIP64_LOCATOR.size
        if locator_at >= 0 and tail[locator_at : locator_at + 4] == b"PK\x06\x07":
            file.seek(_ZIP64_LOCATOR.unpack_from(tail, locator_at)[2])
            num_bytes = max(num_bytes, _zip64_directory_bytes(file))
    return num_bytes


def _zip64_directory_bytes(file: BinaryIO) -> int:
    raw = file.read(_ZIP64_END.size)
    if len(raw) < _ZIP64_END.size or not raw.startswith(b"PK\x06\x06"):
        raise zipfile.BadZipFile("its zip64 end record is missing")
    num_bytes: int = _ZIP64_END.unpack(raw)[8]
    return num_bytes


def _copy(source: IO[bytes], target: BinaryIO, *, num_bytes: int) -> None:
    left = num_bytes
    while left:
        piece = source.read(min(left, _READ_BYTES))
        if not piece:
            raise AdapterInvalid(["the archive is truncated"])
        target.write(piece)
        left -= len(piece)
