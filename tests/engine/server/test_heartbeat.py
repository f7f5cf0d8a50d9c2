"""What a worker writes into a real registry."""

import pytest
import redis.asyncio

from adapters.heartbeat import verify
from adapters.registry import AdapterRegistry
from engine.server.heartbeat import Announcer
from tests.engine.server.conftest import RunningWorker, StartWorker
from tests.valkey import private_valkey

pytestmark = pytest.mark.anyio


async def test_worker_is_known_while_it_serves(start_worker: StartWorker, valkey_url, redis_client):
    registry = AdapterRegistry(redis_client)
    async with start_worker(worker_id="w-1", cluster_token="t") as running:
        announcer = Announcer(
            running.worker,
            address=running.address,
            client=redis.asyncio.Redis.from_url(valkey_url),
        )
        announcer.start()
        while not (workers := await registry.workers()):
            pass
        (heartbeat,) = workers
        assert (heartbeat.worker_id, heartbeat.address) == ("w-1", running.address)
        assert heartbeat.instance == running.worker.supervisor.instance
        assert (heartbeat.num_blocks, heartbeat.num_free_blocks) == (64, 64)
        assert verify(heartbeat, "t")
        assert not verify(heartbeat, "another")
        assert (await registry.bases())["tiny"].identity == heartbeat.base_identity
        assert 0 < await redis_client.pttl("{lp}:worker:w-1") <= 5000
        await announcer.stop()
        assert await registry.workers() == ()


async def test_draining_worker_leaves_at_once(start_worker: StartWorker, redis_client):
    registry = AdapterRegistry(redis_client)
    async with start_worker() as running:
        announcer = Announcer(running.worker, address=running.address, client=redis_client)
        await announcer.beat()
        assert len(await registry.workers()) == 1
        running.worker.is_draining = True
        await announcer.beat()
        assert await registry.workers() == ()
        assert (await running.client.get("/health")).status_code == 503


async def test_registry_may_go_and_come_back_empty(running: RunningWorker, caplog):
    with private_valkey() as url:
        client = redis.asyncio.Redis.from_url(url)
        registry = AdapterRegistry(client)
        announcer = Announcer(running.worker, address=running.address, client=client)
        await announcer.beat()
        assert "tiny" in await registry.bases()
    await announcer.beat()
    await announcer.beat()
    away = [line for line in caplog.messages if "can't be reached" in line]
    assert len(away) == 1, "its absence is logged once"
    await client.aclose()
    assert (await running.client.get("/health")).status_code == 200

    with private_valkey() as url:
        client = redis.asyncio.Redis.from_url(url)
        announcer._redis = client
        announcer._registry = AdapterRegistry(client)
        await announcer.beat()
        assert "tiny" in await AdapterRegistry(client).bases()
        await client.aclose()
