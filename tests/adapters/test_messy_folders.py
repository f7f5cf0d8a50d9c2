"""Folders as people have them: what isn't needed is reported, what is dangerous isn't guessed."""

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from adapters.archive import UnpackReport, collect_directory, move_files, unpack
from adapters.errors import AdapterInvalid
from adapters.validate import inspect_directory
from tests.adapters.worlds import config, safetensors_bytes, tensors, tiny_base

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RAW_CONFIG = json.dumps(config()).encode()
SOUND = {CONFIG: RAW_CONFIG, WEIGHTS: safetensors_bytes(tensors())}
Files = Mapping[str, bytes]

TRAINER_STATE = {
    "trainer_state.json": b"{}",
    "training_args.bin": b"\x80\x04.",
    "rng_state.pth": b"\x80\x04.",
    "scheduler.pt": b"\x80\x04.",
    "optimizer.pt": b"\x80\x04.",
    "scaler.pt": b"\x80\x04.",
}


def below(folder: str, files: Files) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


# What lies beside the two files in real folders; each is taken, and the rest reported.
TAKEN = {
    "the files alone": {},
    "a model card and a licence": {"README.md": b"# card", "README.hf.md": b"", "LICENSE": b""},
    "the trainer's state": TRAINER_STATE,
    "a checkpoint of the trainer without weights": below("checkpoint-500", TRAINER_STATE),
    "a checkpoint whose weights aren't there": below(
        "checkpoint-500", {CONFIG: RAW_CONFIG, **TRAINER_STATE}
    ),
    "seventeen checkpoints with configs alone": {
        f"checkpoint-{number}/{CONFIG}": RAW_CONFIG for number in range(17)
    },
    "event files and logs": {
        "runs/Jan01_00-00-00_host/events.out.tfevents.17.host.1.0": b"x",
        "trainer_log.jsonl": b"{}",
        "all_results.json": b"{}",
        "training_loss.png": b"\x89PNG",
    },
    "an unpacked pickle": below("training_args", {"data.pkl": b"\x80\x04."}),
    "notebooks and caches": {
        "train.ipynb": b"{}",
        ".ipynb_checkpoints/train-checkpoint.ipynb": b"{}",
        "__pycache__/train.cpython-311.pyc": b"x",
        "dataset/cache-1.arrow": b"x",
    },
    "a virtual environment": {
        "venv/pyvenv.cfg": b"home = C:",
        "venv/Scripts/python.exe": b"MZ",
        "some-1.0-py3-none-any.whl": b"PK",
    },
    "what desktops leave": {
        ".DS_Store": b"x",
        "__MACOSX/._adapter_config.json": b"x",
        ".gitkeep": b"",
    },
    "Korean and Chinese names": {"데이터 셋/학습 기록.txt": b"x", "训练数据.json": b"{}"},
    "names with spaces": {"1K Dataset FineTuned model.bin": b"x", "my notes (old).txt": b"x"},
    "half a tokenizer": {"tokenizer_config.json": b"{}", "special_tokens_map.json": b"{}"},
    "a whole tokenizer": {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"},
    "the base's config": {"config.json": b'{"model_type": "llama"}'},
    "an old archive of itself": {"adapter_old.zip": b"PK\x03\x04"},
    "a pickle beside the safetensors": {"adapter_model.bin": b"\x80\x04."},
}
# What nobody may guess from, and what must be said.
REFUSED = {
    "two adapters side by side": (
        below("one", SOUND) | below("two", SOUND),
        "2 adapters (one, two)",
    ),
    "an adapter and a whole checkpoint": (SOUND | below("checkpoint-5", SOUND), "checkpoint-5"),
    "a checkpoint whose weights are a pickle": (
        SOUND | below("checkpoint-5", {CONFIG: b"{}", "adapter_model.bin": b"x"}),
        "2 adapters",
    ),
    "checkpoints alone": (below("checkpoint-5", SOUND) | below("checkpoint-9", SOUND), "none is g"),
    "one folder per base": (
        below("final_checkpoint_llama", SOUND) | below("final_checkpoint_qwen", SOUND),
        "final_checkpoint_qwen",
    ),
    "weights only in a checkpoint": (
        {CONFIG: RAW_CONFIG} | below("checkpoint-5", SOUND),
        "2 adapters",
    ),
    "two halves in two folders": (
        {CONFIG: RAW_CONFIG} | below("checkpoint-5", {WEIGHTS: SOUND[WEIGHTS]}),
        "another folder (checkpoint-5/adapter_model.safetensors)",
    ),
    "the config alone": ({CONFIG: RAW_CONFIG}, "weights are missing"),
    "the config and a link to a drive": (
        {CONFIG: RAW_CONFIG, "link_to_weights.txt": b"https://"},
        "beside it: link_to_weights.txt",
    ),
    "a pickle alone": ({CONFIG: RAW_CONFIG, "adapter_model.bin": b"x"}, "safe_serialization=True"),
    "weights in an archive": ({CONFIG: RAW_CONFIG, "lora.tar.gz": b"x"}, "aren't opened"),
    "MLX-LM's files": (
        {CONFIG: b"{}", "adapters.safetensors": b"x", "0000790_adapters.safetensors": b"x"},
        "MLX-LM",
    ),
    "a config of the wrong name": ({"config.json": b"{}", WEIGHTS: b"x"}, "is missing; found"),
    "a name in capitals": ({"Adapter_Config.json": b"{}", WEIGHTS: b"x"}, "isn't quite"),
    "a name with a suffix of Windows": ({CONFIG + ".txt": b"{}", WEIGHTS: b"x"}, ".json.txt"),
}


def as_folder(files: Files, home: Path) -> UnpackReport:
    for name, data in files.items():
        (home / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "source" / name).write_bytes(data)
    return collect_directory(home / "source", home / "out")


def as_tar(files: Files, home: Path) -> UnpackReport:
    with tarfile.open(home / "a.tar.gz", "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo("my adapter/" + name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return unpack(home / "a.tar.gz", "a.tar.gz", home / "out")


def as_zip(files: Files, home: Path) -> UnpackReport:
    with zipfile.ZipFile(home / "a.zip", "w") as archive:
        archive.mkdir("empty")
        for name, data in files.items():
            archive.writestr(name, data)
    return unpack(home / "a.zip", "a.zip", home / "out")


def as_parts(files: Files, home: Path) -> UnpackReport:
    found = {}
    for number, (name, data) in enumerate(files.items()):
        found[name] = home / str(number)
        found[name].write_bytes(data)
    return move_files(found, home / "out")


WAYS = [as_folder, as_tar, as_zip, as_parts]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mess", TAKEN)
def test_what_is_not_needed_is_skipped_by_name_and_reported(
    way: Callable[[Files, Path], UnpackReport], mess: str, home: Path
) -> None:
    report = way(SOUND | TAKEN[mess], home)

    assert sorted(report.taken) == sorted(SOUND)
    assert sorted(name.removeprefix("my adapter/") for name in report.skipped) == sorted(
        TAKEN[mess]
    )
    assert {file.name: file.read_bytes() for file in (home / "out").iterdir()} == SOUND
    assert inspect_directory(home / "out", tiny_base()).problems == ()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mess", REFUSED)
def test_what_is_dangerous_to_guess_is_refused_in_words(
    way: Callable[[Files, Path], UnpackReport], mess: str, home: Path
) -> None:
    files, words = REFUSED[mess]

    with pytest.raises(AdapterInvalid) as caught:
        way(files, home)

    assert words in str(caught.value).replace("my adapter/", "")
    assert list((home / "out").iterdir()) == []


def test_a_pickle_beside_the_weights_is_never_opened(home: Path) -> None:
    """It is passed over by its name: even a pipe in its place isn't read."""
    source = home / "source"
    source.mkdir()
    for name, data in SOUND.items():
        (source / name).write_bytes(data)
    os.mkfifo(source / "optimizer.pt")

    assert collect_directory(source, home / "out").skipped == ("optimizer.pt",)
