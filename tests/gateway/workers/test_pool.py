"""What a gateway believes of its workers."""

import asyncio

import pytest

from adapters.heartbeat import WorkerHeartbeat
from gateway.workers.pool import SUSPECT_S, WorkerPool


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def heartbeat(worker_id: str = "a", *, instance: str = "i-1") -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker_id=worker_id,
        address=f"http://{worker_id}",
        base_id="tiny",
        base_identity="sha256:00",
        instance=instance,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock):
    pool = WorkerPool(clock=clock)
    pool.update([heartbeat()])
    yield pool
    pool.check_invariants()


def suspects(pool: WorkerPool) -> list[bool]:
    return [view.is_suspect for view in pool.views()]


@pytest.mark.anyio
async def test_suspicion_ends_by_itself(pool, clock):
    pool.suspect("a")
    pool.update([heartbeat()])
    assert suspects(pool) == [True]

    clock.now += SUSPECT_S

    assert suspects(pool) == [False]


@pytest.mark.anyio
async def test_suspicion_ends_when_the_worker_starts_anew(pool):
    pool.suspect("a")

    pool.update([heartbeat(instance="i-2")])

    assert suspects(pool) == [False]


@pytest.mark.anyio
async def test_requests_are_counted_while_they_are_there(pool):
    with pool.sending("a"), pool.sending("a"):
        assert pool.views()[0].num_sent == 2

    assert pool.views()[0].num_sent == 0


@pytest.mark.anyio
async def test_request_waits_for_a_worker_to_come():
    pool = WorkerPool(clock=asyncio.get_running_loop().time)
    waiting = asyncio.create_task(pool.choose(base_id="tiny", lora_id=None, wait_s=20))
    await asyncio.sleep(0)
    assert not waiting.done()

    pool.update([heartbeat()])

    assert (await waiting).worker_id == "a"


@pytest.mark.anyio
async def test_wait_for_a_worker_ends_with_the_suspect_one():
    pool = WorkerPool(clock=asyncio.get_running_loop().time)
    pool.update([heartbeat()])
    pool.suspect("a")

    assert (await pool.choose(base_id="tiny", lora_id=None, wait_s=0.05)).worker_id == "a"
    assert await pool.choose(base_id="other", lora_id=None, wait_s=0.05) is None
