"""Versions that nobody names are unloaded; content that has come back meanwhile is not."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from adapters.manifest import lora_id
from adapters.record import VersionState, publish
from adapters.registry import AdapterRegistry
from adapters.store import AdapterStore
from gateway import pruning
from gateway.pruning import Pruner
from gateway.workers.pool import WorkerPool
from tests.gateway.scripted_worker import Refusal, ScriptedWorker
from tests.gateway.world import gateway_world

pytestmark = pytest.mark.anyio
DIGESTS = ["sha256:" + digit * 64 for digit in "123"]


class Later:
    """Background work that runs when the test says so."""

    def __init__(self) -> None:
        self.work: list[Coroutine[Any, Any, Any]] = []

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> None:
        self.work.append(work)

    async def run(self) -> None:
        while self.work:
            await self.work.pop(0)


class RecordingDriver:
    """Notes what is unloaded; what it says of holds is a list of answers, and then nothing."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []
        self.holds: list[set[str]] = []

    async def unload(self, _worker: Any, *, lora_id: str) -> None:
        self.unloaded.append(lora_id)

    async def held(self, _worker: Any) -> set[str]:
        return self.holds.pop(0) if self.holds else set()


class Scene:
    """A pruner over a real registry and store, one worker, and time in the test's hands."""

    def __init__(self, registry: AdapterRegistry, store: AdapterStore) -> None:
        self.registry = registry
        self.driver = RecordingDriver()
        self.background = Later()
        pool = WorkerPool(clock=lambda: 0.0)
        pool.update([ScriptedWorker().heartbeat()])
        self.pruner = Pruner(
            store=store,
            registry=registry,
            pool=pool,
            drivers={"loraplex": self.driver},
            background=self.background,
        )

    async def publish(self, digest: str, state: VersionState = VersionState.ACTIVE) -> None:
        def add(record):
            return publish(
                record, name="pirate", base_id="tiny", digest=digest, created="now", state=state
            )

        await self.registry.update("pirate", add, actor="test", action="publish")

    async def retire(self) -> None:
        await self.registry.remove("pirate", actor="test")


@pytest.fixture
def scene(redis_client, tmp_path, monkeypatch) -> Scene:
    monkeypatch.setattr(pruning, "IDLE_POLL_S", 0.0)
    return Scene(AdapterRegistry(redis_client), AdapterStore(tmp_path / "store"))


async def test_versions_of_a_name_that_was_given_up_are_unloaded(scene):
    for digest in DIGESTS:
        await scene.publish(digest)
    await scene.retire()

    scene.pruner.remove("pirate", DIGESTS)
    await scene.background.run()

    assert sorted(scene.driver.unloaded) == [lora_id("pirate", digest) for digest in DIGESTS]


@pytest.mark.parametrize("state", [VersionState.ACTIVE, VersionState.PROBING])
@pytest.mark.parametrize("way", ["remove", "forget"])
async def test_content_that_is_a_version_again_stays_loaded(scene, way, state):
    await scene.publish(DIGESTS[0])
    await scene.publish(DIGESTS[1])
    await scene.retire()
    getattr(scene.pruner, way)("pirate", DIGESTS[:2])

    await scene.publish(DIGESTS[0], state)
    await scene.background.run()

    assert scene.driver.unloaded == [lora_id("pirate", DIGESTS[1])]


async def test_content_that_came_back_while_requests_held_it_stays_loaded(scene):
    version = lora_id("pirate", DIGESTS[0])
    scene.driver.holds = [{version}, {version}]
    scene.pruner.forget("pirate", DIGESTS[:1])

    await scene.publish(DIGESTS[0])
    await scene.background.run()

    assert scene.driver.unloaded == []


async def test_the_same_content_under_another_name_is_no_reason_to_keep_it_loaded(scene):
    await scene.publish(DIGESTS[0])

    scene.pruner.remove("parrot", DIGESTS[:1])
    await scene.background.run()

    assert scene.driver.unloaded == [lora_id("parrot", DIGESTS[0])]


async def test_a_version_that_has_failed_is_unloaded_though_its_record_keeps_it(scene):
    await scene.publish(DIGESTS[0], VersionState.FAILED)

    scene.pruner.unload("pirate", DIGESTS[:1])
    await scene.background.run()

    assert scene.driver.unloaded == [lora_id("pirate", DIGESTS[0])]


async def test_a_busy_worker_holds_up_no_other(valkey_url, redis_client, tmp_path, peft_adapters):
    async with gateway_world(valkey_url, tmp_path, num_workers=2) as world:
        version = (await world.push("pirate", peft_adapters["pirate"])).json()["lora_id"]
        for worker in world.workers.values():
            worker.loaded[version] = "somewhere"
            worker.drains[version] = asyncio.Event()

        await world.http.delete("/v1/adapters/pirate")

        try:
            for worker in world.workers.values():
                await asyncio.wait_for(worker.unloaded.wait(), 10)
        finally:
            for worker in world.workers.values():
                worker.drains[version].set()


async def test_content_uploaded_again_waits_for_the_unload_that_is_under_way(world, peft_adapters):
    """A stream holds the version; a DELETE drains it; the same files come again."""
    version = (await world.push("pirate", peft_adapters["pirate"])).json()["lora_id"]
    world.worker.drains[version] = asyncio.Event()
    await world.http.delete("/v1/adapters/pirate")
    await world.worker.unloaded.wait()

    again = asyncio.create_task(world.push("pirate", peft_adapters["pirate"]))
    await world.worker.status_asked.wait()
    world.worker.drains[version].set()
    answer = await again

    assert (answer.status_code, answer.json()["state"]) == (201, "active")
    assert answer.json()["lora_id"] == version
    assert (await world.complete("pirate")).status_code == 200


async def test_a_conflict_that_is_no_drain_is_answered_at_once(world, peft_adapters):
    await world.push_cold("pirate", peft_adapters["pirate"])
    world.worker.load_refusal = Refusal(409, "adapter_unloaded")

    answer = await world.complete("pirate")

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "adapter_unloaded")
