"""Reads tar one header at a time, from the start for every look: no index is trusted.

Python's own tarfile isn't used: a hostile header can keep it busy for hours inside one regular
expression that lets nothing else run, and its tables grow with what the headers say.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from adapters.limits import MAX_MEMBER_NAME_BYTES, MAX_TAR_TEXT_BYTES
from adapters.members import Damaged, Member
from adapters.meter import Meter
from adapters.tar_streams import ByteStream

_BLOCK_BYTES = 512
_READ_BYTES = 1 << 20
_MAX_MEMBER_BYTES = 1 << 48
_FILE_KINDS = (b"0", b"\0", b"7")
_FOLDER_KIND = b"5"
_TEXT_KINDS = (b"x", b"X", b"g", b"L", b"K")
_DANGEROUS_KINDS = {
    b"1": "is a link; links aren't followed",
    b"2": "is a link; links aren't followed",
    b"3": "is a device or a pipe",
    b"4": "is a device or a pipe",
    b"6": "is a device or a pipe",
    b"S": "is a sparse file",
}
# What a header for the whole archive may set; `git archive` writes its commit as a comment.
_INERT_RECORDS = frozenset({b"comment", b"mtime", b"uid", b"gid", b"uname", b"gname"})


@dataclass(slots=True, kw_only=True)
class _Said:
    """What extended headers say of the entry that follows them."""

    name: bytes | None = None
    num_bytes: int | None = None
    num_text_bytes: int = 0
    dangers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    member: Member
    num_bytes: int


class TarArchive:
    """A tar; `open_stream` unpacks its file."""

    def __init__(
        self, path: Path, meter: Meter, *, open_stream: Callable[[BinaryIO, Meter], ByteStream]
    ) -> None:
        self._path = path
        self._meter = meter
        self._open_stream = open_stream

    def members(self) -> Iterator[Member]:
        """List every entry, then read on to the very end, where a checksum may stand."""
        with self._path.open("rb") as file:
            stream = self._open_stream(file, self._meter)
            for entry in _entries(stream):
                yield entry.member
                _pass_on(stream, entry.num_bytes, None)
            while stream.read(_READ_BYTES):
                pass

    def copy(self, name: str, target: BinaryIO) -> None:
        self._meter.restart_bytes()
        with self._path.open("rb") as file:
            stream = self._open_stream(file, self._meter)
            for entry in _entries(stream):
                is_wanted = entry.member.is_file and entry.member.name == name
                _pass_on(stream, entry.num_bytes, target if is_wanted else None)
                if is_wanted:
                    return
        raise Damaged(f"{name[:200]!r} has gone")


def _entries(stream: ByteStream) -> Iterator[_Entry]:
    """Yield the entries in turn; whoever asks has read the bytes of each before the next."""
    said, common_dangers = _Said(), list[str]()
    while header := stream.read(_BLOCK_BYTES):
        if not header.strip(b"\0"):
            return
        _check_header(header)
        kind, num_bytes = header[156:157], _number(header[124:136])
        if kind in _TEXT_KINDS:
            text = _text(stream, num_bytes, said)
            _listen(kind, text, said, common_dangers)
            continue
        if said.num_bytes is not None and kind in _FILE_KINDS:
            num_bytes = said.num_bytes
        yield _entry(header, kind, num_bytes, said, common_dangers)
        said = _Said()


def _entry(
    header: bytes, kind: bytes, num_bytes: int, said: _Said, common_dangers: list[str]
) -> _Entry:
    name = _name(header) if said.name is None else said.name
    dangers = [*said.dangers, *common_dangers]
    if kind not in _FILE_KINDS and kind != _FOLDER_KIND:
        shown = kind.decode("latin-1")
        dangers.insert(0, _DANGEROUS_KINDS.get(kind, f"is of the unknown kind {shown!r}"))
    if len(name) > MAX_MEMBER_NAME_BYTES:
        dangers.insert(
            0, f"has a name of {len(name)} bytes; at most {MAX_MEMBER_NAME_BYTES} are read"
        )
    # Old tars write a folder as a file whose name ends so.
    is_file = kind in _FILE_KINDS and not (kind == b"\0" and name.endswith(b"/"))
    member = Member(
        name=name[:MAX_MEMBER_NAME_BYTES].decode(errors="surrogateescape"),
        is_file=is_file,
        danger=dangers[0] if dangers else None,
    )
    return _Entry(member=member, num_bytes=num_bytes if kind in _FILE_KINDS else 0)


def _check_header(header: bytes) -> None:
    if len(header) < _BLOCK_BYTES:
        raise Damaged("it is truncated")
    as_summed = header[:148] + b" " * 8 + header[156:]
    # Some old writers summed signed bytes.
    sums = (sum(as_summed), sum(as_summed) - 256 * sum(byte >= 128 for byte in as_summed))
    if _number(header[148:156]) not in sums:
        raise Damaged("what should be the header of an entry isn't one")


def _number(raw: bytes) -> int:
    if raw[0] == 0x80:
        value = int.from_bytes(raw[1:])
    else:
        digits = raw.strip(b"\0 ") or b"0"
        if digits.strip(b"01234567"):
            raise Damaged("a header holds a number that isn't one")
        value = int(digits, 8)
    if value > _MAX_MEMBER_BYTES:
        raise Damaged(f"an entry claims {value} bytes")
    return value


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0":
        prefix = header[345:500].split(b"\0", 1)[0]
        return prefix + b"/" + name if prefix else name
    return name


def _text(stream: ByteStream, num_bytes: int, said: _Said) -> bytes:
    said.num_text_bytes += num_bytes
    if said.num_text_bytes > MAX_TAR_TEXT_BYTES:
        raise Damaged(
            f"an entry's header is longer than any real one: {said.num_text_bytes} bytes, and at "
            f"most {MAX_TAR_TEXT_BYTES} are read"
        )
    return _exactly(stream, num_bytes + -num_bytes % _BLOCK_BYTES)[:num_bytes]


def _listen(kind: bytes, text: bytes, said: _Said, common_dangers: list[str]) -> None:
    if kind == b"L":
        said.name = text.rstrip(b"\0")
    elif kind == b"g":
        keys = [key for key, _ in _records(text)]
        if not _INERT_RECORDS.issuperset(keys) and not common_dangers:
            common_dangers.append("follows a header that sets something for the whole archive")
    elif kind in (b"x", b"X"):
        for key, value in _records(text):
            if key == b"path":
                said.name = value
            elif key == b"size":
                said.num_bytes = _decimal(value)
            elif key.startswith(b"GNU.sparse."):
                said.dangers.append("is a sparse file")


def _records(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of `<length> <key>=<value>\\n` records."""
    start = 0
    while start < len(text):
        digits, space, _ = text[start : start + 20].partition(b" ")
        end = start + (_decimal(digits) if space else 0)
        record = text[start + len(digits) + 1 : end]
        key, equals, value = record.partition(b"=")
        if not key or not equals or not value.endswith(b"\n") or end > len(text):
            raise Damaged("an extended header can't be read")
        yield key, value[:-1]
        start = end


def _decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 15:
        raise Damaged("an extended header holds a number that isn't one")
    return int(digits)


def _pass_on(stream: ByteStream, num_bytes: int, target: BinaryIO | None) -> None:
    """Read a file's bytes and the rest of its last block, and write them to `target` if any."""
    left = num_bytes
    while left:
        piece = _exactly(stream, min(left, _READ_BYTES))
        left -= len(piece)
        if target is not None:
            target.write(piece)
    _exactly(stream, -num_bytes % _BLOCK_BYTES)


def _exactly(stream: ByteStream, num_bytes: int) -> bytes:
    data = stream.read(num_bytes) if num_bytes else b""
    if len(data) < num_bytes:
        raise Damaged("it is truncated")
    return data
