"""Who waits for Redis can be cancelled at any moment, and the client is of use afterwards."""

import asyncio

import pytest

from adapters.redis_connection import connect

pytestmark = pytest.mark.anyio
NUM_STEPS = 40


@pytest.mark.parametrize("is_pipeline", [False, True])
async def test_a_cancelled_command_never_goes_on(valkey_url, is_pipeline):
    """asyncio.wait_for forgets a cancellation that comes when its work is done, before 3.12."""
    client = connect(valkey_url)

    async def ask() -> object:
        if not is_pipeline:
            return await client.echo("x")
        async with client.pipeline(transaction=False) as commands:
            return await commands.echo("x").echo("y").execute()

    expected = [b"x", b"y"] if is_pipeline else b"x"
    num_cancelled = 0
    for num_steps in [*range(NUM_STEPS)] * 2:
        task = asyncio.create_task(ask())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        was_cancelled = task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() is was_cancelled, f"after {num_steps} steps"
        num_cancelled += was_cancelled
        # What it had asked is answered to nobody else.
        assert await ask() == expected
    assert num_cancelled > 0
    await client.aclose()


async def test_a_deadline_around_commands_is_kept(valkey_url):
    client = connect(valkey_url)
    for num_steps in range(NUM_STEPS):
        with pytest.raises(TimeoutError):
            await _ask_for_ever(client, num_steps=num_steps)
    await client.aclose()


async def _ask_for_ever(client, *, num_steps: int) -> None:
    """The deadline is over after so many rounds of the loop."""
    async with asyncio.timeout(None) as deadline:
        loop = asyncio.get_running_loop()
        loop.call_soon(_expire_after, loop, num_steps, deadline)
        while True:
            await client.echo("x")


def _expire_after(loop, num_steps: int, deadline: asyncio.Timeout) -> None:
    if num_steps > 0:
        loop.call_soon(_expire_after, loop, num_steps - 1, deadline)
    else:
        deadline.reschedule(loop.time())
