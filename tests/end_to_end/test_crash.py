"""Real SIGKILLs: what was acknowledged is still there, serving goes on, nothing stays behind."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
import redis

from tests.end_to_end.processes import command_of, descendants_of, is_gone
from tests.end_to_end.serving import serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
BASE = "SmolLM2-135M-Instruct"
RECOVERY_S = 15


@pytest.fixture
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("crash")
    adapters = [f"--adapter={name}={EXAMPLES / name}" for name in ("json", "pirate")]
    with serving(*adapters, state_dir=root / "state", log=root / "serve.log") as running:
        yield running


def answer_of(server, model: str) -> str:
    """Return the greedy answer, or raise if it isn't 200."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def serves_again_within(server, seconds: float, *, expected: dict[str, str]) -> None:
    """Assert that every model answers as before, soon enough after the kill."""
    deadline = time.monotonic() + seconds
    for model, text in expected.items():
        while True:
            try:
                assert answer_of(server, model) == text
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline, f"{model} doesn't answer {seconds} s later"
                time.sleep(0.1)


def answers(server) -> dict[str, str]:
    return {model: answer_of(server, model) for model in (BASE, f"{BASE}:json", f"{BASE}:pirate")}


def core_pid_of(server) -> int:
    (core,) = [
        pid
        for pid in descendants_of(server.process.pid)
        if "engine.core_process" in command_of(pid)
    ]
    return core


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has one policy only")
def test_servers_wait_for_the_core_and_not_the_core_for_them(server):
    servers = (server.process.pid, server.pids["workers"][0])
    assert [os.sched_getscheduler(pid) for pid in servers] == [os.SCHED_BATCH] * 2
    assert os.sched_getscheduler(core_pid_of(server)) == os.SCHED_OTHER


def test_killed_core_comes_back_with_its_adapters(server):
    before = answers(server)

    os.kill(core_pid_of(server), signal.SIGKILL)

    serves_again_within(server, RECOVERY_S, expected=before)


def test_stream_of_a_killed_core_ends_with_an_error_event(server):
    body = {"model": BASE, "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}
    lines = []
    with (
        server.client() as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer,
    ):
        for line in answer.iter_lines():
            if not lines:
                os.kill(core_pid_of(server), signal.SIGKILL)
            if line.startswith("data:"):
                lines.append(line)

    assert lines[-1] == "data: [DONE]"
    assert '"error"' in lines[-2]


def test_killed_worker_server_comes_back_with_its_adapters(server):
    before = answers(server)
    core = core_pid_of(server)

    os.kill(server.pids["workers"][0], signal.SIGKILL)

    eventually(lambda: is_gone(core))
    serves_again_within(server, RECOVERY_S, expected=before)


def test_killed_valkey_comes_back_with_every_acknowledged_adapter(server, tmp_path):
    before = answers(server)
    socket = server.ready["redis_url"].removeprefix("unix://")
    run_id = run_id_of(socket)
    with server.client() as http:
        files = [
            ("files", (path.name, path.read_bytes()))
            for path in (EXAMPLES / "brief").iterdir()
            if path.suffix in {".json", ".safetensors"}
        ]
        pushed = http.post("/v1/adapters", data={"name": "late"}, files=files)
        assert pushed.status_code == 201, pushed.text

    os.kill(server.pids["valkey"], signal.SIGKILL)

    serves_again_within(server, RECOVERY_S, expected=before)
    assert answer_of(server, f"{BASE}:late")
    assert run_id_of(socket) != run_id
    with server.client() as http:
        record = http.get("/v1/adapters/late").json()
    assert record["versions"][0]["digest"] == pushed.json()["digest"]


def test_terminated_serve_leaves_no_process_behind(server):
    family = descendants_of(server.process.pid)
    assert len(family) >= 3

    exit_code = server.terminate()

    assert exit_code == 0
    eventually(lambda: all(is_gone(pid) for pid in family))


def test_killed_serve_leaves_no_process_behind(server):
    family = descendants_of(server.process.pid)

    server.process.kill()
    server.process.wait(timeout=10)

    eventually(lambda: all(is_gone(pid) for pid in family))


def run_id_of(socket: str) -> str:
    """Ask until it answers: a killed Valkey takes a moment to come back."""
    found: list[str] = []

    def ask() -> bool:
        try:
            with redis.Redis(unix_socket_path=socket) as client:
                found.append(client.info("server")["run_id"])
        except redis.RedisError:
            return False
        return True

    eventually(ask)
    return found[-1]
