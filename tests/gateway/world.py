"""A gateway with a real Valkey, a real store and scripted workers, reached over real HTTP."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from adapters.heartbeat import sign
from adapters.registry import AdapterRegistry
from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.gateway.peft_adapters import tiny_base
from tests.gateway.scripted_worker import ScriptedWorker
from tests.gateway.serving import served

LONG_MS = 600_000
WEIGHTS = ("adapter_config.json", "adapter_model.safetensors")


class World:
    """What a test touches: the client, the workers by id, the registry behind the gateway."""

    def __init__(
        self, http: httpx.AsyncClient, registry: AdapterRegistry, store_dir: Path, **parts: Any
    ) -> None:
        self.http = http
        self.registry = registry
        self.store_dir = store_dir
        self.workers: dict[str, ScriptedWorker] = parts["workers"]
        self.token: str | None = parts["token"]

    @property
    def worker(self) -> ScriptedWorker:
        (worker,) = self.workers.values()
        return worker

    async def beat(self, worker: ScriptedWorker, **changes: Any) -> None:
        """Write a heartbeat; the next request reads it."""
        heartbeat = sign(worker.heartbeat(**changes), self.token)
        await self.registry.put_heartbeat(heartbeat, ttl_ms=LONG_MS)

    async def push(self, name: str, folder: Path, **fields: str) -> httpx.Response:
        """Upload the two files of an adapter."""
        files = [("files", (file, (folder / file).read_bytes())) for file in WEIGHTS]
        return await self.http.post("/v1/adapters", data={"name": name, **fields}, files=files)

    async def push_cold(self, name: str, folder: Path) -> httpx.Response:
        """Upload an adapter; then the worker begins anew, so that it has loaded nothing."""
        answer = await self.push(name, folder)
        self.worker.begin_anew()
        await self.beat(self.worker)
        return answer

    async def complete(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "Hello", **fields}
        return await self.http.post("/v1/completions", json=body)


@asynccontextmanager
async def gateway_world(
    redis_url: str,
    store_dir: Path,
    *,
    num_workers: int = 1,
    token: str | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """Run a gateway and its workers for the length of the block."""
    fields: dict[str, Any] = {"worker_wait_s": 0.2, "snapshot_interval_s": 30.0, **settings}
    async with AsyncExitStack() as held:
        redis = Redis.from_url(redis_url)
        held.push_async_callback(redis.aclose)
        registry = AdapterRegistry(redis, cluster_token=token)
        await registry.put_base(tiny_base())
        workers = {}
        for number in range(1, num_workers + 1):
            worker = ScriptedWorker(f"w-{number}", token=token)
            worker.address = await held.enter_async_context(served(worker.app))
            workers[worker.worker_id] = worker
        app = create_app(
            GatewaySettings(redis_url=redis_url, store_dir=store_dir, cluster_token=token, **fields)
        )
        address = await held.enter_async_context(served(app))
        http = await held.enter_async_context(
            httpx.AsyncClient(base_url=address, timeout=20, trust_env=False, verify=False)
        )
        world = World(http, registry, store_dir, workers=workers, token=token)
        for worker in workers.values():
            await world.beat(worker)
        yield world
