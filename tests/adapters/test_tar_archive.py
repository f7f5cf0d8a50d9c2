"""Our tar reader reads what tarfile and GNU tar write, and is bounded where those aren't."""

import gzip
import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.archive import unpack
from adapters.errors import AdapterError, AdapterInvalid, AdapterTooLarge
from adapters.limits import MAX_MEMBER_NAME_BYTES, UploadLimits
from adapters.meter import Meter
from adapters.tar_archive import TarArchive
from adapters.tar_streams import GzipStream, PlainStream

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIALECTS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
_NAMES = st.lists(
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1)
    .map(lambda text: text[:60])
    .filter(lambda text: text not in (".", "..")),
    min_size=1,
    max_size=4,
).map("/".join)


def tar_bytes(files: dict[str, bytes], dialect: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=dialect) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def contents(path: Path, *, packed: bool) -> dict[str, bytes]:
    archive = TarArchive(
        path, Meter(UploadLimits()), open_stream=GzipStream if packed else PlainStream
    )
    found = {}
    for member in archive.members():
        assert member.danger is None
        target = io.BytesIO()
        archive.copy(member.name, target)
        found[member.name] = target.getvalue()
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
@given(files=st.dictionaries(_NAMES, st.binary(max_size=1500), max_size=5))
def test_what_tarfile_writes_is_read(
    dialect: int, files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tar") / "a"
    try:
        raw = tar_bytes(files, dialect)
    except ValueError:
        return  # a name too long for ustar
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        expected = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    path.write_bytes(raw)
    assert contents(path, packed=False) == expected

    # As several gzip members, cut anywhere, with zeros behind.
    cut = len(raw) // 3
    path.write_bytes(gzip.compress(raw[:cut]) + gzip.compress(raw[cut:]) + bytes(100))
    assert contents(path, packed=True) == expected


def test_what_gnu_tar_writes_is_read(tmp_path: Path) -> None:
    source = tmp_path / "어댑터 folder"
    source.mkdir()
    for name in (CONFIG, WEIGHTS, "n" * 120):
        (source / name).write_bytes(os.urandom(700))
    subprocess.run(["tar", "-czf", tmp_path / "a", source.name], cwd=tmp_path, check=True)
    (tmp_path / "out").mkdir()

    report = unpack(tmp_path / "a", "a", tmp_path / "out")

    assert report.skipped == (f"{source.name}/{'n' * 120}",)
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


@given(data=st.data())
def test_no_tar_is_beyond_words(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Headers are damaged and summed anew, so that the damage is believed."""
    path = tmp_path_factory.mktemp("tar") / "a"
    files = {CONFIG: b"{}", "é" * 80: b"x" * 600, WEIGHTS: b"w"}
    raw = bytearray(tar_bytes(files, data.draw(st.sampled_from(DIALECTS[1:]))))
    for _ in range(data.draw(st.integers(1, 4))):
        block = 512 * data.draw(st.integers(0, len(raw) // 512 - 1))
        raw[block + data.draw(st.integers(0, 511))] = data.draw(st.integers(0, 255))
        header = raw[block : block + 148] + b" " * 8 + raw[block + 156 : block + 512]
        raw[block + 148 : block + 156] = f"{sum(header):06o}\0 ".encode()
    path.write_bytes(raw)
    (path.parent / "out").mkdir()
    try:
        report = unpack(path, "a", path.parent / "out")
    except AdapterError:
        return
    assert set(report.taken) == {CONFIG, WEIGHTS}


def test_a_gzip_whose_header_never_ends_costs_no_more_than_its_bytes(tmp_path: Path) -> None:
    """Python's own gzip module reads such a name byte by byte."""
    path = tmp_path / "a"
    path.write_bytes(b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (8 << 20))
    started = time.process_time()

    with pytest.raises(AdapterInvalid, match="truncated"):
        unpack(path, "a", tmp_path)

    assert time.process_time() - started < 1


@pytest.mark.parametrize("text", [b"9" * 60_000, b"9" * 30_000 + b" hdrcharset", b"1 " * 30_000])
def test_a_hostile_pax_header_costs_no_more_than_its_bytes(text: bytes, tmp_path: Path) -> None:
    """Python's own tarfile takes time by the square of such digits."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(text)
    block = info.tobuf() + text + bytes(-len(text) % 512)
    (tmp_path / "a").write_bytes(block * 20)
    started = time.process_time()

    with pytest.raises(AdapterInvalid, match="extended header"):
        unpack(tmp_path / "a", "a", tmp_path)

    assert time.process_time() - started < 1


def test_a_long_name_is_refused_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(tar_bytes({"n" * 2000: b""}, tarfile.GNU_FORMAT))

    with pytest.raises(AdapterInvalid, match=f"2000 bytes; at most {MAX_MEMBER_NAME_BYTES}"):
        unpack(tmp_path / "a", "a", tmp_path)


def test_reading_that_takes_too_long_is_given_up_with_both_numbers() -> None:
    now = iter([0, 30, 60, 63])
    meter = Meter(UploadLimits(max_unpack_s=60), clock=lambda: next(now))
    meter.count(1)
    meter.count(1)

    with pytest.raises(AdapterTooLarge, match="has taken 63 seconds; at most 60"):
        meter.count(1)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (UploadLimits(max_total_bytes=10), "11 bytes or more; at most 10 bytes"),
        (
            UploadLimits(ratio_free_bytes=5, max_ratio=2),
            "of 3 bytes unpacks to 11 .* at most 6 .*2 times",
        ),
    ],
)
def test_every_limit_is_named_with_both_numbers(limits: UploadLimits, words: str) -> None:
    with pytest.raises(AdapterTooLarge, match=words):
        Meter(limits, packed_bytes=3).count(11)


def test_a_global_header_of_git_archive_is_harmless(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    comment = {"comment": "4b825dc642cb6eb9a060e54bf8d69288fbee4904"}
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers=comment
    ) as archive:
        for name in (CONFIG, WEIGHTS):
            archive.addfile(tarfile.TarInfo(name))
    (tmp_path / "a").write_bytes(buffer.getvalue())
    (tmp_path / "out").mkdir()

    assert set(unpack(tmp_path / "a", "a", tmp_path / "out").taken) == {CONFIG, WEIGHTS}
