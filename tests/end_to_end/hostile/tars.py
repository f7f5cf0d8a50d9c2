"""Tars that climb, link, lie or swell."""

import gzip
import io
import tarfile
from collections.abc import Callable, Mapping

from tests.end_to_end.hostile.case import CONFIG, WEIGHTS, Case, archive_case

MIB = 1 << 20


def entry(name: str, data: bytes = b"", **fields: object) -> bytes:
    """Return header and data of one entry, in the ustar dialect."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def pax(text: bytes, kind: bytes = b"x") -> bytes:
    return entry("PaxHeader", text, type=kind)


def record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return f"{length}{rest}".encode()


def tar_of(files: Mapping[str, bytes], *more: bytes) -> bytes:
    entries = [entry(name, data) for name, data in files.items()]
    return b"".join([*entries, *more, bytes(1024)])


def patched(block: bytes, at: int, value: bytes) -> bytes:
    """Overwrite a field of a header and sum it anew."""
    header = bytearray(block[:512])
    header[at : at + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + block[512:]


def tar_with(name: str, words: str, *more: bytes, status: int = 422) -> Case:
    """A sound adapter, and entries beside it."""
    return archive_case(
        f"tar {name}", words, lambda files: tar_of(files, *more), status=status, filename="a.tar"
    )


def tar_case(
    name: str, words: str, build: Callable[[dict[str, bytes]], bytes], *, status: int = 422
) -> Case:
    return archive_case(f"tar {name}", words, build, status=status, filename="a.tar")


def gz_case(
    name: str, words: str, build: Callable[[dict[str, bytes]], bytes], *, status: int = 422
) -> Case:
    return archive_case(f"tar.gz {name}", words, build, status=status)


def linked(kind: bytes, name: str, target: str) -> bytes:
    return entry(name, type=kind, linkname=target)


def bomb(files: Mapping[str, bytes]) -> bytes:
    """A few hundred kilobytes that hold a gigabyte of zeros in a member that isn't needed."""
    head = tar_of(files)[:-1024] + entry("zeros", size=1 << 30)[:512]
    zeros = gzip.compress(bytes(16 * MIB), 9)
    return gzip.compress(head) + zeros * 64 + gzip.compress(bytes(1024))


def spoilt_checksum(files: Mapping[str, bytes]) -> bytes:
    raw = bytearray(gzip.compress(tar_of(files)))
    raw[-8] ^= 0xFF
    return bytes(raw)


def many_members(files: Mapping[str, bytes]) -> bytes:
    one = entry("x")
    return gzip.compress(tar_of(files)[:-1024] + one * 20_001 + bytes(1024), 1)


def named_many_times(files: Mapping[str, bytes]) -> bytes:
    """Names of 60 kB each, which would fill the memory of whoever keeps them."""
    longname = entry("././@LongLink", b"n" * 60_000, type=b"L") + entry("x")
    return gzip.compress(tar_of(files)[:-1024] + longname * 400 + bytes(1024), 1)


def bz2_of(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:bz2") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    return buffer.getvalue()


LIES = [
    tar_case(
        "whose size claims a terabyte",
        "truncated",
        lambda files: tar_of({CONFIG: files[CONFIG]}, entry(WEIGHTS, size=1 << 40)),
    ),
    tar_with(
        "with a negative size",
        "number that isn't one",
        patched(entry("x"), 124, b"\xff" * 12),
    ),
    tar_with("with a size that is text", "number that isn't one", patched(entry("x"), 124, b"big")),
    tar_with("with a wrong checksum", "isn't one", entry("x")[:-1].replace(b"\0ustar", b"\0usta")),
    tar_with("with pax size lies", "truncated", pax(record("size", str(10**12))) + entry("x")),
    tar_with("with a pax size of letters", "number that", pax(record("size", "ten")) + entry("x")),
    tar_with("with a pax record cut short", "can't be read", pax(b"99 path=x\n") + entry("x")),
    tar_with("with a pax header of sixty thousand digits", "can't be read", pax(b"9" * 60_000)),
    tar_with("with a pax header of a megabyte", "longer than any", pax(b"1 " * (MIB // 2))),
    tar_with(
        "with a global header that renames all",
        "whole archive",
        pax(record("path", CONFIG), b"g") + entry("x"),
    ),
    tar_with("cut in the middle of an entry", "truncated", entry("x", b"y" * 5000)[:600]),
    tar_with("with an entry of an unknown kind", "unknown kind", entry("x", type=b"Z")),
]
CASES = [
    tar_with("member that climbs", "climbs out", entry("../../evil-climber", b"x")),
    tar_with("member that climbs halfway", "climbs out", entry("a/../../evil-climber", b"x")),
    tar_with("member with an absolute name", "absolute", entry("/tmp/evil-absolute", b"x")),
    tar_with("member that climbs by backslashes", "climbs out", entry("..\\evil", b"x")),
    tar_with("member on a drive", "absolute", entry("C:/evil", b"x")),
    tar_with(
        "member that climbs by a pax path", "climbs", pax(record("path", "../e")) + entry("x")
    ),
    tar_with("with a symbolic link", "is a link", linked(b"2", "x", "/etc/passwd")),
    tar_with("with a hard link", "is a link", linked(b"1", "x", CONFIG)),
    tar_with(
        "that writes through a linked folder",
        "is a link",
        linked(b"2", "folder", "/tmp") + entry("folder/evil-through", b"x"),
    ),
    tar_case(
        "whose config is a link",
        "is a link",
        lambda files: tar_of({WEIGHTS: files[WEIGHTS]}, linked(b"2", CONFIG, "/etc/passwd")),
    ),
    tar_with("with a character device", "device", entry("x", type=b"3", devmajor=1, devminor=5)),
    tar_with("with a block device", "device", entry("x", type=b"4")),
    tar_with("with a pipe", "device or a pipe", entry("x", type=b"6")),
    tar_with("with a GNU sparse file", "sparse", entry("x", type=b"S")),
    tar_with(
        "with a pax sparse file",
        "sparse",
        pax(record("GNU.sparse.major", "1") + record("GNU.sparse.realsize", str(1 << 50)))
        + entry("x"),
    ),
    tar_with("with the config twice", "twice", entry(CONFIG, b"{}")),
    tar_with("with the config twice in disguise", "twice", entry("./" + CONFIG, b"{}")),
    *LIES,
    gz_case("that is a bomb", "decompression bomb", bomb, status=413),
    gz_case("of twenty thousand members", "at most 20000", many_members, status=413),
    gz_case("of endless names", "at most 1024", named_many_times),
    gz_case("of a hundred thousand empty streams", "empty", lambda _: gzip.compress(b"") * 100_000),
    gz_case("that is truncated", "truncated", lambda files: gzip.compress(tar_of(files))[:-30]),
    gz_case("with a wrong checksum", "incorrect data check", spoilt_checksum),
    gz_case(
        "with something behind it",
        "incorrect header check",
        lambda files: gzip.compress(tar_of(files)) + b"evil",
    ),
    gz_case("that holds no tar", "isn't one", lambda files: gzip.compress(files[WEIGHTS])),
    gz_case("that is bzip2", "bzip2 archives aren't read", bz2_of),
    gz_case("that is plain text", "no archive", lambda _: b"hello" * 200),
]
