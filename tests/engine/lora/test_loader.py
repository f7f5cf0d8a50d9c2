"""The loader process: images for good folders, words for bad ones, and it may die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from adapters.digest import adapter_digest
from adapters.validate import inspect_directory
from engine.lora.arena_image import read_image
from engine.lora.loader import LoadBroken, LoadDone, LoaderClient, LoadRefused
from engine.lora.loader_messages import FrameBuffer, LoadJob, LoadResult, encode_frame
from engine.lora.loader_process import image_name, remove_unfinished, run
from tests.adapters.worlds import config, tiny_base
from tests.engine.lora.worlds import peft_folder
from tests.waiting import eventually

BASE = tiny_base(lora_rows={"attention": 16, "mlp": 16})
LORA_ID = "style@0123456789ab"


@pytest.fixture
def loader() -> Iterator[LoaderClient]:
    client = LoaderClient()
    yield client
    client.close()


def submit(loader: LoaderClient, folder: Path, *, lora_id: str = LORA_ID) -> None:
    loader.submit(
        lora_id, directory=folder, image_dir=folder.parent / "images", base=BASE, dtype="bf16"
    )


def results_of(loader: LoaderClient, count: int) -> list[LoadResult]:
    results: list[LoadResult] = []

    def enough() -> bool:
        results.extend(loader.poll())
        return len(results) >= count

    eventually(enough, timeout_s=60)
    return results


def job(folder: Path, *, lora_id: str = LORA_ID, dtype: str = "bf16", **base: str) -> LoadJob:
    return LoadJob(
        lora_id=lora_id,
        directory=str(folder),
        image_dir=str(folder.parent / "images"),
        base=msgspec.structs.replace(BASE, **base),
        dtype=dtype,
    )


def digest_of(folder: Path, *, lora_id: str = LORA_ID) -> str:
    result = run(job(folder, lora_id=lora_id))
    assert isinstance(result, LoadDone)
    return result.content_digest


def test_a_good_folder_becomes_an_image(loader: LoaderClient, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", {"q_proj": 4, "down_proj": 2})
    submit(loader, folder)
    assert loader.is_busy
    (result,) = results_of(loader, 1)
    assert isinstance(result, LoadDone)
    assert (result.lora_id, result.max_rank) == (LORA_ID, 4)
    assert result.num_rows == {"attention": 4, "mlp": 2}
    assert len(read_image(result.image).header.slices) == 4
    assert [path.name for path in (tmp_path / "images").iterdir()] == [result.image.name]
    assert not loader.is_busy
    assert loader.poll() == []


def test_the_content_s_digest_tells_weights_apart_and_names_don_t_count(tmp_path: Path) -> None:
    """The same files under two names are one content; new weights under an old name are another."""
    ranks = {"q_proj": 4}
    folder = peft_folder(tmp_path / "adapter", ranks, seed=1)
    digests = [digest_of(folder), digest_of(folder), digest_of(folder, lora_id="other")]
    digests.append(digest_of(peft_folder(tmp_path / "copy", ranks, seed=1)))
    assert len(set(digests)) == 1
    adapter = inspect_directory(folder, BASE).adapter
    assert adapter is not None
    assert digests[0] == adapter_digest(adapter)
    peft_folder(folder, ranks, seed=2)
    assert digest_of(folder) != digests[0]


def test_a_bad_folder_is_answered_with_every_problem(loader: LoaderClient, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", {"q_proj": 4})
    (folder / "adapter_config.json").write_text(
        msgspec.json.encode(config(r=8, use_dora=True, target_modules=["q_proj"])).decode()
    )
    submit(loader, folder)
    (result,) = results_of(loader, 1)
    assert isinstance(result, LoadRefused)
    words = "\n".join(result.problems)
    assert "dora" in words.lower()
    assert "lora_A has shape" in words
    assert not list((tmp_path / "images").iterdir())


def test_an_adapter_wider_than_the_arena_is_refused_before_it_is_laid_out(tmp_path: Path) -> None:
    result = run(job(peft_folder(tmp_path / "adapter", {"q_proj": 17})))
    assert isinstance(result, LoadRefused)
    assert "17" in result.problems[0]
    assert "16" in result.problems[0]


def test_a_missing_folder_is_refused_in_words_without_its_path(tmp_path: Path) -> None:
    result = run(job(tmp_path / "absent"))
    assert isinstance(result, LoadBroken | LoadRefused)
    assert str(tmp_path) not in str(result).replace(LORA_ID, "")


def test_many_jobs_are_answered_in_order(loader: LoaderClient, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", {"v_proj": 2})
    names = [f"a{number}@0123456789ab" for number in range(20)]
    for name in names:
        submit(loader, folder, lora_id=name)
    results = results_of(loader, 20)
    assert [result.lora_id for result in results] == names
    assert all(isinstance(result, LoadDone) for result in results)


def test_the_death_of_the_loader_costs_one_job(tmp_path: Path) -> None:
    """The first process never answers and is killed; the next one is the real loader."""
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        "import os, pathlib, sys\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "if mark.exists():\n"
        "    os.execv(sys.executable, [sys.executable, '-m', 'engine.lora.loader_process'])\n"
        "mark.touch()\n"
        "sys.stdin.buffer.read()\n"
    )
    loader = LoaderClient(command=[sys.executable, str(deaf), str(tmp_path / "mark")])
    try:
        folder = peft_folder(tmp_path / "adapter", {"v_proj": 2})
        submit(loader, folder, lora_id="first")
        submit(loader, folder, lora_id="second")
        eventually((tmp_path / "mark").exists)
        assert loader.poll() == []
        assert loader.pid is not None
        os.kill(loader.pid, signal.SIGKILL)
        broken, done = results_of(loader, 2)
        assert isinstance(broken, LoadBroken)
        assert broken.lora_id == "first"
        assert "-9" in broken.message
        assert isinstance(done, LoadDone)
        assert done.lora_id == "second"
    finally:
        loader.close()


def test_the_death_of_an_idle_loader_is_not_noticed(loader: LoaderClient, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", {"v_proj": 2})
    submit(loader, folder, lora_id="first")
    results_of(loader, 1)
    pid = loader.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: loader.poll() == [] and loader.pid is None)
    submit(loader, folder, lora_id="second")
    (result,) = results_of(loader, 1)
    assert isinstance(result, LoadDone)


def test_the_loader_ends_when_its_input_does() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.lora.loader_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, b"")


def test_the_loader_never_imports_torch() -> None:
    check = "import sys, engine.lora.loader_process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_whole_images_are_found_again_and_broken_ones_made_again(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", {"q_proj": 4})
    first = run(job(folder))
    assert isinstance(first, LoadDone)
    inode = first.image.stat().st_ino
    again = run(job(folder))
    assert again == first
    assert first.image.stat().st_ino == inode
    first.image.write_bytes(first.image.read_bytes()[:-1])
    assert run(job(folder)) == first
    read_image(first.image)


def test_an_image_is_for_these_files_this_base_and_this_format_only(tmp_path: Path) -> None:
    """New weights under an old name, above all, never meet the old image."""
    folder = peft_folder(tmp_path / "adapter", {"q_proj": 4}, seed=1)
    names = {
        image_name(job(folder)),
        image_name(job(folder, lora_id="other@0123456789ab")),
        image_name(job(folder, dtype="fp32")),
        image_name(job(folder, identity="sha256:" + "cd" * 32)),
        image_name(job(peft_folder(tmp_path / "copy", {"q_proj": 4}, seed=1))),
    }
    assert len(names) == 5
    peft_folder(folder, {"q_proj": 4}, seed=2)
    assert image_name(job(folder)) not in names


def test_image_names_are_file_names_whatever_the_lora_id(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", {"q_proj": 4})
    for lora_id in ("../../etc/passwd", "org/name", "ü" * 300, "a b\n"):
        name = image_name(job(folder, lora_id=lora_id))
        assert Path(name).name == name
        assert name.isascii()
        assert len(name) < 150
    assert image_name(job(folder, lora_id="a/b")) != image_name(job(folder, lora_id="a_b"))


def test_what_dead_loaders_left_half_written_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        (tmp_path / f".a.arena.{pid}.unfinished").touch()
    (tmp_path / "a.arena").touch()
    remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "a.arena",
        f".a.arena.{os.getpid()}.unfinished",
    }


def test_frames_survive_any_cutting(tmp_path: Path) -> None:
    messages = [job(tmp_path, lora_id="x" * length) for length in (0, 1, 300)]
    stream = b"".join(encode_frame(message) for message in messages)
    for size in (1, 3, 7, len(stream)):
        frames = FrameBuffer()
        bodies = []
        for start in range(0, len(stream), size):
            bodies += frames.feed(stream[start : start + size])
        assert [msgspec.msgpack.decode(body, type=LoadJob) for body in bodies] == messages
