"""A client that leaves is noticed by the core, whatever it was waiting for."""

import asyncio
import json
import socket

import anyio
import pytest

from tests.engine.server.conftest import RunningWorker
from tests.engine.server.echo_core import Mishap

pytestmark = pytest.mark.anyio

ENDLESS = {"model": "tiny", "prompt": "around and ", "seed": Mishap.ENDLESS, "max_tokens": 99}
SILENT = {**ENDLESS, "seed": Mishap.SILENCE}


def open_raw(running: RunningWorker, body: dict[str, object]) -> socket.socket:
    """Send a request over a bare socket, so that the test decides how it ends."""
    host, port = running.address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


async def wait_until_running(running: RunningWorker, number: int = 1) -> None:
    while await running.num_running() != number:  # noqa: ASYNC110  another process
        await asyncio.sleep(0.01)


async def test_leaving_a_stream_ends_the_work(running: RunningWorker):
    body = {**ENDLESS, "stream": True}
    async with running.client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            break
        assert await running.num_running() == 1
    await running.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [SILENT, ENDLESS], ids=["silent", "endless"])
async def test_leaving_at_any_time_ends_the_work(running: RunningWorker, body, stream):
    connection = open_raw(running, {**body, "stream": stream})
    await wait_until_running(running)
    connection.close()
    await running.wait_until_idle()
    assert running.worker.core.client.num_in_flight == 0


async def test_leaving_ends_all_prompts_of_a_request(running: RunningWorker):
    connection = open_raw(running, {**ENDLESS, "prompt": ["a ", "b ", "c "], "stream": True})
    await wait_until_running(running, 3)
    connection.close()
    await running.wait_until_idle()


async def test_failing_prompt_ends_its_sisters(running: RunningWorker):
    body = {**ENDLESS, "prompt": ["a ", "b "], "seed": Mishap.ERROR_AFTER_TWO_TOKENS}
    response = await running.post("/v1/completions", body)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the step failed"
    await running.wait_until_idle()


async def test_many_clients_that_come_and_go_leave_nothing(running: RunningWorker):
    async def visit(number: int) -> None:
        body = {**ENDLESS, "stream": number % 2 == 0}
        connection = open_raw(running, body)
        for _ in range(number % 4):
            await running.num_running()
        connection.close()

    async with anyio.create_task_group() as tasks:
        for number in range(24):
            tasks.start_soon(visit, number)
    await running.wait_until_idle()
    client = running.worker.core.client
    client.check_invariants()
    assert client.num_in_flight == 0
    response = await running.post("/v1/completions", {"model": "tiny", "prompt": "still here"})
    assert response.json()["choices"][0]["text"] == "still here"
