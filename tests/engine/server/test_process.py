"""The worker as a process: its lines, its signals, its end."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.server.echo_core import Mishap
from tests.waiting import eventually

pytestmark = pytest.mark.slow

Worker = subprocess.Popen[bytes]


@contextmanager
def worker_process(model: Path | str, **settings: Any) -> Iterator[Worker]:
    state_dir = tempfile.mkdtemp(prefix="loraplex-test-")
    engine = {"model": str(model), "state_dir": state_dir, "served_model_name": "tiny"}
    config = json.dumps({"engine": engine, **settings})
    environment = {k: v for k, v in os.environ.items() if k != "LORAPLEX_CLUSTER_TOKEN"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.server.echo_worker", "--config", config],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    try:
        yield process
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def line_of(process: Worker, event: str) -> dict[str, Any]:
    for raw in process.stdout:
        line = json.loads(raw)
        if line["event"] == event:
            return line
    raise AssertionError(f"the worker ended without {event!r}: {process.stderr.read().decode()}")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_ready_line_tells_all(model_dir: Path):
    with worker_process(model_dir, worker_id="w-7") as process:
        assert json.loads(process.stdout.readline()) == {
            "event": "progress",
            "text": "reading weights",
        }
        ready = line_of(process, "ready")
        assert ready["base_id"] == "tiny"
        assert ready["num_blocks"] == 64
        assert httpx.get(ready["address"] + "/health").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_with_0(model_dir: Path, number):
    """A stream that runs is finished; then the process ends and its core with it."""
    with worker_process(model_dir) as process:
        address = line_of(process, "ready")["address"]
        body = {"model": "tiny", "prompt": [70] * 60, "max_tokens": 60, "stream": True}
        with httpx.stream("POST", address + "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(timeout=30) == 0
        logs = process.stderr.read().decode()
    assert "Traceback" not in logs


@needs_proc
def test_worker_ends_with_its_parent(model_dir: Path):
    with worker_process(model_dir) as process:
        line_of(process, "ready")
        (core,) = children_of(process.pid)
        process.stdin.close()
        assert process.wait(timeout=30) == 0
        eventually(lambda: is_gone(core))


@needs_proc
def test_core_ends_with_a_killed_worker(model_dir: Path):
    with worker_process(model_dir) as process:
        line_of(process, "ready")
        (core,) = children_of(process.pid)
        process.kill()
        eventually(lambda: is_gone(core))


def test_request_that_never_ends_does_not_keep_a_worker(model_dir: Path):
    """A second signal ends the wait."""
    with worker_process(model_dir) as process:
        address = line_of(process, "ready")["address"]
        body = {"model": "tiny", "prompt": "x", "seed": Mishap.SILENCE}
        asking = threading.Thread(target=_post_and_ignore, args=(address, body))
        asking.start()
        status = address + "/internal/status"
        eventually(lambda: httpx.get(status).json()["num_running_seqs"] == 1)
        process.terminate()
        eventually(lambda: _refuses(address))
        process.terminate()
        assert process.wait(timeout=10) == 0
        asking.join()


@needs_proc
def test_signal_while_the_core_starts_ends_both():
    with worker_process("never-ready") as process:
        line_of(process, "progress")
        (core,) = children_of(process.pid)
        process.terminate()
        assert process.wait(timeout=30) == 0
        assert is_gone(core)


def test_sockets_of_a_killed_worker_are_removed_by_the_next(model_dir: Path):
    folder = Path(tempfile.gettempdir())
    with worker_process(model_dir) as process:
        line_of(process, "ready")
        process.kill()
        process.wait()
        assert list(folder.glob(f"loraplex-core-{process.pid}-*"))
    with worker_process(model_dir) as another:
        line_of(another, "ready")
        assert not list(folder.glob(f"loraplex-core-{process.pid}-*"))


def test_taken_port_is_one_line_that_says_what_to_do(model_dir: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with worker_process(model_dir, port=taken.getsockname()[1]) as process:
            failed = line_of(process, "failed")
            assert "choose another" in failed["message"]
            assert process.wait(timeout=30) == 2


def test_model_that_can_not_be_served_is_one_line():
    with worker_process("no-such-model") as process:
        failed = line_of(process, "failed")
        assert failed["message"] == "no such model; try another"
        assert failed["code"] == "unsupported_model"
        assert process.wait(timeout=30) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "LORAPLEX_CLUSTER_TOKEN"),
        ({"cluster_token": "x"}, "LORAPLEX_CLUSTER_TOKEN"),
        ({"surprise": 1}, "surprise"),
        ({"port": 70_000}, "port"),
    ],
)
def test_bad_settings_are_one_line(model_dir: Path, settings, words):
    with worker_process(model_dir, **settings) as process:
        assert words in line_of(process, "failed")["message"]
        assert process.wait(timeout=30) == 2


def _post_and_ignore(address: str, body: object) -> None:
    try:
        httpx.post(address + "/v1/completions", json=body, timeout=60)
    except httpx.HTTPError:
        return


def _refuses(address: str) -> bool:
    try:
        httpx.get(address + "/health")
    except httpx.HTTPError:
        return True
    return False
