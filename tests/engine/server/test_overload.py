"""A full queue is refused with an honest time to come back."""

import anyio
import pytest

from engine.server import core_client
from engine.server.backlog import MAX_WAIT_S, UNKNOWN_WAIT_S
from tests.engine.server.conftest import RunningWorker
from tests.engine.server.echo_core import Mishap

pytestmark = pytest.mark.anyio
TEXT = {"model": "tiny", "prompt": "hello there", "max_tokens": 4}


def assert_refused(answer) -> float:
    """Assert that it is OpenAI's 429; return the seconds that it says."""
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
    assert answer.headers["x-should-retry"] == "true"
    wait_s = int(answer.headers["retry-after-ms"]) / 1000
    assert wait_s <= int(answer.headers["retry-after"]) < wait_s + 1
    return wait_s


async def refused_by_core(running: RunningWorker) -> float:
    return assert_refused(
        await running.post("/v1/completions", TEXT | {"seed": Mishap.QUEUE_IS_FULL})
    )


async def test_what_the_core_refuses_says_how_long_the_queue_takes(start_worker):
    async with start_worker() as running:
        assert await refused_by_core(running) == UNKNOWN_WAIT_S
        assert (await running.post("/v1/completions", TEXT)).status_code == 200
        short_s = await refused_by_core(running)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.post, "/v1/completions", TEXT | {"seed": Mishap.SILENCE})
            # Nothing comes, so the same few tokens take longer and longer.
            while (long_s := await refused_by_core(running)) <= short_s:  # noqa: ASYNC110
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()

        assert long_s <= MAX_WAIT_S
        running.worker.core.client.check_invariants()


async def test_queue_is_bounded_by_tokens(start_worker, monkeypatch):
    monkeypatch.setattr(core_client, "MAX_WAITING_TOKENS", 5)
    async with start_worker() as running:
        client = running.worker.core.client
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.post, "/v1/completions", TEXT | {"seed": Mishap.SILENCE})
            while client.num_waiting_tokens == 0:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert client.num_waiting_tokens > 5

            assert_refused(await running.post("/v1/completions", TEXT))
            assert_refused(await running.post("/v1/completions", TEXT | {"stream": True}))
            tasks.cancel_scope.cancel()

        while client.num_waiting_tokens > 0:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        assert (await running.post("/v1/completions", TEXT)).status_code == 200
        client.check_invariants()
