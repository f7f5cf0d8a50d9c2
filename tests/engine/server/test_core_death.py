"""A core that ends: who waits is told, and another one serves soon."""

import os
import signal
from pathlib import Path

import anyio
import pytest

from engine.config import EngineConfig
from engine.server.core_client import CoreStartFailed
from engine.server.core_supervisor import CoreSupervisor
from tests.engine.server.conftest import ECHO_CORE, RunningWorker, StartWorker
from tests.engine.server.echo_core import Mishap
from tests.engine.server.test_answers import chunks_of

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BODY = {"model": "tiny", "prompt": "one two three", "max_tokens": 50}


async def test_before_the_first_byte_it_is_a_503(running: RunningWorker):
    for stream in (False, True):
        before = running.worker.supervisor.instance
        body = {**BODY, "seed": Mishap.CRASH_AT_ONCE, "stream": stream}
        response = await running.post("/v1/completions", body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert response.headers["x-should-retry"] == "true"
        await running.wait_until_healthy()
        assert running.worker.supervisor.instance != before
    assert (await running.post("/v1/completions", BODY)).status_code == 200


async def test_after_the_first_byte_it_is_an_error_event_then_done(running: RunningWorker):
    body = {**BODY, "seed": Mishap.CRASH_AFTER_TWO_TOKENS, "stream": True}
    response = await running.post("/v1/completions", body)
    assert response.status_code == 200
    *pieces, last = chunks_of(response.text)
    assert len(pieces) == 2
    assert last["error"]["code"] == "engine_unavailable"
    await running.wait_until_healthy()


async def test_everyone_who_waits_is_told(running: RunningWorker):
    """A killed core fails ten requests at once; the next one is served."""
    statuses: list[int] = []

    async def ask() -> None:
        response = await running.post("/v1/completions", {**BODY, "seed": Mishap.SILENCE})
        statuses.append(response.status_code)

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(ask)
        while await running.num_running() < 10:  # noqa: ASYNC110  another process
            await anyio.sleep(0.01)
        os.kill(running.worker.core.process.pid, signal.SIGKILL)
    assert statuses == [503] * 10
    assert (await running.client.get("/health")).status_code == 503
    with anyio.fail_after(15):
        await running.wait_until_healthy()
    assert (await running.post("/v1/completions", BODY)).json()["choices"][0]["text"] == BODY[
        "prompt"
    ]
    assert any("serving again" in line["text"] for line in running.lines)


async def test_core_that_sends_nonsense_is_replaced(running: RunningWorker):
    before = running.worker.supervisor.instance
    response = await running.post("/v1/completions", {**BODY, "seed": Mishap.NONSENSE})
    assert response.status_code == 503
    await running.wait_until_healthy()
    assert running.worker.supervisor.instance != before


@pytest.mark.parametrize(
    ("model", "words", "code"),
    [
        ("no-such-model", "no such model; try another", "unsupported_model"),
        ("dies-at-start", "status 7", "engine_unavailable"),
    ],
)
async def test_first_start_that_fails_says_why(model, words, code, tmp_path):
    engine = EngineConfig(model=model, state_dir=str(tmp_path))
    supervisor = CoreSupervisor(engine, command=ECHO_CORE, emit=lambda _line: None)
    with pytest.raises(CoreStartFailed, match=words) as failed:
        await supervisor.start()
    assert failed.value.code == code
    await supervisor.stop()


async def test_unreadable_tokenizer_is_a_failed_start(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    engine = EngineConfig(model=str(tmp_path), state_dir=str(tmp_path / "state"))
    supervisor = CoreSupervisor(engine, command=ECHO_CORE, emit=lambda _line: None)
    with pytest.raises(CoreStartFailed, match="tokenizer"):
        await supervisor.start()
    await supervisor.stop()


async def test_stop_leaves_neither_process_nor_files(start_worker: StartWorker):
    async with start_worker() as running:
        process = running.worker.core.process
        socket_dir = running.worker.supervisor._socket_dir
        assert socket_dir.is_dir()
    assert process.returncode is not None
    assert not socket_dir.exists()
