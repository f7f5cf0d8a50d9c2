import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.archive import UnpackReport, collect_directory, unpack
from adapters.errors import AdapterError, AdapterInvalid, AdapterTooLarge
from adapters.limits import UploadLimits

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b"{}", WEIGHTS: b"w" * 1000}
Pack = Callable[[Path, dict[str, bytes]], Path]


def pack_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def pack_tar_gz(path: Path, files: dict[str, bytes]) -> Path:
    return pack_tar(path, files, "w:gz")


def pack_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


PACKS = [pack_tar, pack_tar_gz, pack_zip]


def taken(path: Path, **limits: int) -> tuple[UnpackReport, dict[str, bytes]]:
    destination = path.parent / "out"
    destination.mkdir()
    report = unpack(path, "upload", destination, limits=UploadLimits(**limits))
    return report, {file.name: file.read_bytes() for file in destination.iterdir()}


def refusal(path: Path, **limits: int) -> str:
    with pytest.raises((AdapterInvalid, AdapterTooLarge)) as caught:
        taken(path, **limits)
    return str(caught.value)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("folder", ["", "./", "my adapter/", "a/b/파일/"])
def test_the_needed_files_are_taken_from_any_depth(pack: Pack, folder: str, tmp_path: Path) -> None:
    files = {folder + name: data for name, data in FILES.items()}
    report, found = taken(pack(tmp_path / "a", files))
    assert found == FILES
    assert sorted(report.taken) == sorted(FILES)
    assert report.skipped == ()


MESS = {
    "README.md": b"# card",
    "training_args.bin": b"pickle",
    "optimizer.pt": b"pickle",
    "checkpoint-5/trainer_state.json": b"{}",
    "runs/events.out.tfevents.1.host": b"x",
    "tokenizer.json": b"{}",
    "1K Daten.bin": b"x",
    "config.json": b"{}",
    "old.zip": b"PK",
    "한글.txt": b"x",
}


@pytest.mark.parametrize("pack", PACKS)
def test_what_is_not_needed_is_skipped_and_reported(pack: Pack, tmp_path: Path) -> None:
    report, found = taken(pack(tmp_path / "a", FILES | MESS))
    assert found == FILES
    assert sorted(report.skipped) == sorted(MESS)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mred", "half\udcff"])
def test_a_name_that_cannot_be_shown_is_escaped(name: str, tmp_path: Path) -> None:
    report, found = taken(pack_tar(tmp_path / "a", FILES | {name: b"x"}))
    assert found == FILES
    assert all(skipped.isprintable() for skipped in report.skipped)


def test_a_long_name_is_read_in_every_tar_dialect(tmp_path: Path) -> None:
    for dialect in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        folder = tmp_path / str(dialect)
        folder.mkdir()
        with tarfile.open(folder / "a", "w", format=dialect) as archive:
            for name, data in FILES.items():
                info = tarfile.TarInfo("d" * 150 + "/é/" + name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        assert taken(folder / "a")[1] == FILES


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../evil", "climbs out"),
        ("a/../../evil", "climbs out"),
        ("/etc/passwd", "absolute"),
        ("C:/evil", "absolute"),
        ("a\\..\\evil", "climbs out"),
        ("a\\b", "backslash"),
    ],
)
def test_a_dangerous_name_refuses_the_archive(
    pack: Pack, name: str, words: str, tmp_path: Path
) -> None:
    assert words in refusal(pack(tmp_path / "a", FILES | {name: b"x"}))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (tarfile.SYMTYPE, "link"),
        (tarfile.LNKTYPE, "link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "device or a pipe"),
    ],
)
def test_links_and_devices_refuse_a_tar(kind: bytes, words: str, tmp_path: Path) -> None:
    pack_tar(tmp_path / "a", FILES)
    with tarfile.open(tmp_path / "a", "a") as archive:
        info = tarfile.TarInfo("x")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    assert words in refusal(tmp_path / "a")


def test_a_link_refuses_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w") as archive:
        info = zipfile.ZipInfo(CONFIG)
        info.create_system, info.external_attr = 3, 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    assert "link" in refusal(tmp_path / "a")


def test_an_unusual_packing_refuses_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(CONFIG, b"{}")
    assert "other than deflate" in refusal(tmp_path / "a")


def test_an_encrypted_member_refuses_a_zip(tmp_path: Path) -> None:
    raw = bytearray(pack_zip(tmp_path / "a", FILES).read_bytes())
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw[raw.find(magic) + offset] |= 1
    (tmp_path / "a").write_bytes(raw)
    assert "encrypted" in refusal(tmp_path / "a")


@pytest.mark.parametrize("pack", PACKS)
def test_two_adapters_are_never_guessed_between(pack: Pack, tmp_path: Path) -> None:
    files = FILES | {f"checkpoint-5/{name}": data for name, data in FILES.items()}
    found = refusal(pack(tmp_path / "a", files))
    assert "2 adapters" in found
    assert "checkpoint-5" in found


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({CONFIG: b"{}"}, "weights are missing"),
        ({CONFIG: b"{}", "adapter_model.bin": b"x"}, "pickle"),
        ({CONFIG: b"{}", "adapters.safetensors": b"x"}, "MLX-LM"),
        ({CONFIG: b"{}", "weights.tar.gz": b"x"}, "aren't opened"),
        ({CONFIG: b"{}", f"other/{WEIGHTS}": b"x"}, "another folder"),
        ({WEIGHTS: b"x"}, "adapter_config.json is missing"),
        ({"lora.zip": b"PK"}, "aren't opened"),
        ({"a.txt": b"x"}, "found: a.txt"),
    ],
)
def test_what_is_missing_is_said(
    pack: Pack, files: dict[str, bytes], words: str, tmp_path: Path
) -> None:
    assert words in refusal(pack(tmp_path / "a", files))


@pytest.mark.parametrize("pack", PACKS)
def test_an_empty_archive_is_said_to_be_empty(pack: Pack, tmp_path: Path) -> None:
    assert "empty" in refusal(pack(tmp_path / "a", {}))


def test_a_member_that_stands_twice_is_refused(tmp_path: Path) -> None:
    pack_tar(tmp_path / "a", FILES)
    pack_tar(tmp_path / "a", {"./" + CONFIG: b'{"r": 1}'}, "a")
    assert "twice" in refusal(tmp_path / "a")


@pytest.mark.parametrize("pack", [pack_tar_gz, pack_zip])
def test_a_bomb_is_given_up_early(pack: Pack, tmp_path: Path) -> None:
    path = pack(tmp_path / "a", FILES | {WEIGHTS: bytes(20 << 20)})
    assert "bomb" in refusal(path, ratio_free_bytes=1 << 20)


def test_a_bomb_in_a_member_that_is_not_needed_costs_no_more(tmp_path: Path) -> None:
    path = pack_tar_gz(tmp_path / "a", FILES | {"zeros": bytes(20 << 20)})
    assert "bomb" in refusal(path, ratio_free_bytes=1 << 20)


@pytest.mark.parametrize("pack", PACKS)
def test_too_many_bytes_are_refused_with_the_limit(pack: Pack, tmp_path: Path) -> None:
    files = FILES | {WEIGHTS: os.urandom(200_000)}
    assert "100000 bytes" in refusal(pack(tmp_path / "a", files), max_total_bytes=100_000)


@pytest.mark.parametrize("pack", PACKS)
def test_too_many_members_are_refused_with_the_limit(pack: Pack, tmp_path: Path) -> None:
    files = FILES | {f"{number}": b"" for number in range(20)}
    assert "11 files and folders or more; at most 10" in refusal(
        pack(tmp_path / "a", files), max_members=10
    )


def test_a_giant_table_of_contents_is_refused_before_it_is_read(tmp_path: Path) -> None:
    raw = pack_zip(tmp_path / "a", FILES).read_bytes()
    at = raw.rfind(b"PK\x05\x06")
    (tmp_path / "a").write_bytes(raw[: at + 12] + struct.pack("<L", 1 << 30) + raw[at + 16 :])
    assert "table of contents" in refusal(tmp_path / "a")


def test_a_giant_tar_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    (tmp_path / "a").write_bytes(info.tobuf() + bytes(10240))
    assert "longer than any real one" in refusal(tmp_path / "a")


@pytest.mark.parametrize(
    ("start", "words"),
    [(b"BZh9", "bzip2"), (b"\xfd7zXZ\0", "xz"), (b"Rar!", "rar"), (b"7z\xbc\xaf", "7z"),
     (b"\x28\xb5\x2f\xfd", "zstd"), (b"hello", "no archive"), (b"", "no archive")],
)  # fmt: skip
def test_another_format_is_refused_by_name(start: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(start)
    assert words in refusal(tmp_path / "a")


@pytest.mark.parametrize("pack", PACKS)
@given(data=st.data())
def test_damage_is_refused_in_words_or_harmless(
    pack: Pack, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    raw = bytearray(pack(folder / "a", FILES | {"x/y": b"z" * 50}).read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "a").write_bytes(raw)
    try:
        _, found = taken(folder / "a")
    except AdapterError:
        return
    assert set(found) == set(FILES)


def test_tar_gz_reads_long_archives_without_starting_over(tmp_path: Path) -> None:
    """A step back at every header would unpack the whole stream again and again."""
    files = {f"{number:04}": os.urandom(1024) for number in range(2000)} | FILES
    path = pack_tar_gz(tmp_path / "a", files)
    assert taken(path, max_total_bytes=3 << 20)[1] == FILES


def test_a_folder_is_collected_by_the_same_rules(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "out"
    for name, data in (FILES | MESS).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    destination.mkdir()

    report = collect_directory(source, destination)

    assert {file.name: file.read_bytes() for file in destination.iterdir()} == FILES
    assert sorted(report.skipped) == sorted(MESS)


def test_a_folder_with_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"{}")
    source = tmp_path / "source"
    source.mkdir()
    (source / WEIGHTS).write_bytes(b"w")
    (source / CONFIG).symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(AdapterInvalid, match="is a link"):
        collect_directory(source, tmp_path / "out")


def test_a_folder_behind_a_link_is_not_entered(tmp_path: Path) -> None:
    for name in ("source", "elsewhere", "out"):
        (tmp_path / name).mkdir()
    for name, data in FILES.items():
        (tmp_path / "elsewhere" / name).write_bytes(data)
    (tmp_path / "source" / "folder").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterInvalid, match=r"empty|missing"):
        collect_directory(tmp_path / "source", tmp_path / "out")


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    for name in ("source", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "source" / CONFIG).write_bytes(b"{}")
    os.mkfifo(tmp_path / "source" / WEIGHTS)
    with pytest.raises(AdapterInvalid, match="isn't a regular file"):
        collect_directory(tmp_path / "source", tmp_path / "out")


def test_a_folder_that_is_too_large_is_refused(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "out"
    for folder in (source, destination):
        folder.mkdir()
    for name, data in FILES.items():
        (source / name).write_bytes(data)
    with pytest.raises(AdapterTooLarge, match="500 bytes"):
        collect_directory(source, destination, limits=UploadLimits(max_total_bytes=500))
    with pytest.raises(AdapterTooLarge, match="at most 1 are read"):
        collect_directory(source, destination, limits=UploadLimits(max_members=1))
