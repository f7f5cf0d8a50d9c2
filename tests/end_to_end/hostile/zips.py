"""Zips that climb, link, lie or swell, and archives whose content is dangerous to guess."""

import io
import struct
import zipfile
from collections.abc import Callable, Mapping

from tests.end_to_end.hostile.case import CONFIG, WEIGHTS, Case, archive_case, zip_of

SHARD, INDEX = "adapter_model-{:05}-of-{:05}.safetensors", "adapter_model.safetensors.index.json"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def zip_case(
    name: str, words: str, build: Callable[[dict[str, bytes]], bytes], *, status: int = 422
) -> Case:
    return archive_case(f"zip {name}", words, build, status=status, filename="adapter.zip")


def zip_with(name: str, words: str, *members: str) -> Case:
    return zip_case(name, words, lambda files: zip_of(files | dict.fromkeys(members, b"x")))


Change = Callable[[dict[str, bytes]], dict[str, bytes]]


def folder(name: str, words: str, change: Change) -> Case:
    """A well-made zip of a folder that can't be used."""
    return zip_case(f"folder {name}", words, lambda files: zip_of(change(files)))


def with_entry(files: Mapping[str, bytes], **fields: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        info = zipfile.ZipInfo("x")
        for field, value in fields.items():
            setattr(info, field, value)
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


def edited(raw: bytes, find: bytes, offset: int, value: bytes, *, last: bool = False) -> bytes:
    """Overwrite bytes at an offset from the first, or last, place of `find`."""
    at = (raw.rfind(find) if last else raw.find(find)) + offset
    return raw[:at] + value + raw[at + len(value) :]


def encrypted(files: Mapping[str, bytes]) -> bytes:
    raw = edited(zip_of(files), b"PK\x03\x04", 6, b"\x01")
    return edited(raw, b"PK\x01\x02", 8, b"\x01")


def duplicated(files: Mapping[str, bytes]) -> bytes:
    raw = zip_of(files | {"adapter_config.jsom": b"{}"})
    return raw.replace(b"adapter_config.jsom", CONFIG.encode())


def zip64_to_nowhere(files: Mapping[str, bytes]) -> bytes:
    raw = zip_of(files)
    at = raw.rfind(b"PK\x05\x06")
    return raw[:at] + struct.pack("<4sLQL", b"PK\x06\x07", 0, len(raw) * 9, 1) + raw[at:]


def zip64_of_an_exabyte(files: Mapping[str, bytes]) -> bytes:
    raw = zip_of(files)
    at = raw.rfind(b"PK\x05\x06")
    end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, 1 << 60, 0)
    return raw[:at] + end + struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1) + raw[at:]


def shrunk(files: Mapping[str, bytes]) -> bytes:
    """The table of contents says that the config has ten bytes."""
    return edited(zip_of(files), b"PK\x01\x02", 24, struct.pack("<L", 10))


def bzip2_packed(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(CONFIG, files[CONFIG])
    return buffer.getvalue()


def sharded(numbers: list[tuple[int, int]], index: bytes = b"") -> Change:
    """The weights, whole, as each of some numbered shards."""

    def change(files: dict[str, bytes]) -> dict[str, bytes]:
        shards = {SHARD.format(*number): files[WEIGHTS] for number in numbers}
        return {CONFIG: files[CONFIG], **shards} | ({INDEX: index} if index else {})

    return change


SHARDS = [
    folder("of shards of which one is missing", "1 of them are missing", sharded([(1, 2)])),
    folder("of ninety thousand shards", "at most 256", sharded([(1, 99_999)])),
    folder("of shards of two sets", "different sets", sharded([(1, 1), (1, 2), (2, 2)])),
    folder("of shards that hold the same", "", sharded([(1, 2), (2, 2)])),
    folder("whose index names other files", INDEX, sharded(
        [(1, 1)], b'{"weight_map": {"a": "../../../etc/passwd"}}')),
    folder("whose index is garbage", INDEX, sharded([(1, 1)], b"\xff")),
    folder("whose index nests deeply", INDEX, sharded([(1, 1)], b"[" * 50_000)),
    folder("of weights and shards of them", "isn't guessed", lambda files: (
        files | {SHARD.format(1, 1): files[WEIGHTS]})),
]  # fmt: skip
FOLDERS = [
    folder(
        "of two adapters",
        "2 adapters",
        lambda files: files | {f"other/{name}": data for name, data in files.items()},
    ),
    folder(
        "of checkpoints alone",
        "checkpoint-10",
        lambda files: {f"checkpoint-{n}/{k}": d for n in (5, 10) for k, d in files.items()},
    ),
    folder(
        "with weights in a nested archive",
        "aren't opened",
        lambda files: {CONFIG: files[CONFIG], "weights.zip": zip_of(files)},
    ),
    folder("that is an archive in an archive", "unpack", lambda f: {"adapter.zip": zip_of(f)}),
    folder(
        "with a pickle alone", "pickle", lambda f: {CONFIG: f[CONFIG], "adapter_model.bin": b"x"}
    ),
    folder("written by MLX", "MLX-LM", lambda f: {CONFIG: b"{}", "adapters.safetensors": b"x"}),
    folder("of LFS pointers", "git lfs pull", lambda _: {CONFIG: LFS, WEIGHTS: LFS}),
    folder("without weights", "weights are missing", lambda files: {CONFIG: files[CONFIG]}),
    folder("without a config", "config.json is missing", lambda files: {WEIGHTS: files[WEIGHTS]}),
    folder(
        "torn apart", "another folder", lambda f: {CONFIG: f[CONFIG], f"w/{WEIGHTS}": f[WEIGHTS]}
    ),
    folder("with nothing in it", "empty", lambda _: {}),
    folder("with names in two cases", "isn't quite", lambda f: f | {CONFIG.upper(): b"{}"}),
    folder(
        "with a name of wide letters",
        "isn't quite",
        lambda files: files | {"\uff41dapter_config.json": b"{}"},
    ),
    folder(
        "with a name that hides a character",
        "isn't quite",
        lambda files: files | {"adapter\u200b_config.json": b"{}"},
    ),
    folder(
        "with a name written backwards", "isn't quite", lambda f: f | {"\u202e" + CONFIG: b"{}"}
    ),
]
CASES = [
    zip_with("member that climbs", "climbs out", "../../evil-climber"),
    zip_with("member with an absolute name", "absolute", "/tmp/evil-absolute"),
    zip_with("member that climbs by backslashes", "climbs out", "..\\evil"),
    zip_with("member of a very long name", "at most 1024", "n" * 30_000),
    zip_case(
        "member with a zero byte",
        "zero byte",
        lambda f: zip_of(f | {"config.jsonX.txt": b"{}"}).replace(b"jsonX.txt", b"json\0.txt"),
    ),
    zip_case("with a link", "link", lambda files: with_entry(files, external_attr=0o120777 << 16)),
    zip_case("with a device", "device", lambda f: with_entry(f, external_attr=0o020666 << 16)),
    zip_case("that is encrypted", "encrypted", encrypted),
    zip_case("packed by another method", "other than deflate", bzip2_packed),
    zip_case(
        "with a wrong checksum",
        "bad crc",
        lambda files: edited(zip_of(files), b"PK\x01\x02", 16, b"\0\0\0\0"),
    ),
    zip_case("with the config twice", "twice", duplicated),
    zip_case(
        "that is a bomb",
        "decompression bomb",
        lambda files: zip_of(files | {WEIGHTS: bytes(80 << 20)}),
        status=413,
    ),
    zip_case("whose zip64 record is nowhere", "zip64", zip64_to_nowhere),
    zip_case("whose zip64 record claims an exabyte", "table of", zip64_of_an_exabyte, status=413),
    zip_case(
        "whose table claims a gigabyte",
        "table of contents",
        lambda files: edited(zip_of(files), b"PK\x05\x06", 12, struct.pack("<L", 1 << 30)),
        status=413,
    ),
    zip_case("that names two files in one place", "differ", lambda files: edited(
        zip_of(files), b"PK\x03\x04", 30, b"z")),
    zip_case("whose table shrinks a file", "bad crc", shrunk),
    zip_case("that is truncated", "truncated", lambda files: zip_of(files)[:-40]),
    zip_case("of garbage", "no archive", lambda _: b"\1" * 600),
    *SHARDS,
    *FOLDERS,
]  # fmt: skip
