"""Redis goes away, comes back, and comes back empty."""

import asyncio

import pytest
from redis.asyncio import Redis

from adapters.errors import RegistryBroken
from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.gateway.world import gateway_world
from tests.valkey import private_valkey

pytestmark = pytest.mark.anyio


async def eventually(condition, *, timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110  (what is awaited sets no event)
            await asyncio.sleep(0.02)


async def test_without_redis_the_last_snapshot_serves_and_says_so(tmp_path, peft_adapters):
    with private_valkey() as url:
        world_context = gateway_world(url, tmp_path)
        world = await world_context.__aenter__()
        digest = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]
    try:
        answer = await world.complete("pirate")
        unknown = await world.complete("tiny:nope")
        models = await world.http.get("/v1/models")
        health = await world.http.get("/health")
        upload = await world.push("json", peft_adapters["json"])
    finally:
        await world_context.__aexit__(None, None, None)

    assert answer.status_code == 200
    assert answer.headers["x-loraplex-registry"] == "snapshot"
    assert answer.headers["x-loraplex-version"] == digest
    assert unknown.status_code == 503
    assert unknown.json()["error"]["code"] == "registry_unavailable"
    assert models.headers["x-loraplex-registry"] == "snapshot"
    assert [model["id"] for model in models.json()["data"]] == ["tiny", "tiny:pirate"]
    assert health.json() == {"status": "ok", "registry": "unreachable", "workers": 1}
    assert upload.status_code == 503
    assert upload.json()["error"]["code"] == "registry_unavailable"
    assert upload.headers["retry-after"] == "1"
    assert url.removeprefix("unix://") not in upload.text


async def test_empty_redis_is_filled_from_the_journal(
    valkey_url, redis_client: Redis, tmp_path, peft_adapters
):
    async with gateway_world(valkey_url, tmp_path) as world:
        await world.push("pirate", peft_adapters["pirate"])
        before = (await world.push("pirate", peft_adapters["json"], promote="true")).json()
    await redis_client.flushall()

    async with gateway_world(valkey_url, tmp_path) as world:
        after = (await world.http.get("/v1/adapters/pirate")).json()
        answer = await world.complete("pirate")

    assert [version["version"] for version in after["versions"]] == ["v1", "v2"]
    assert after["aliases"]["default"]["digest"] == before["digest"]
    assert after["versions"][1]["coverage"] == "4/14 modules"
    assert answer.headers["x-loraplex-version"] == before["digest"]


async def test_local_copy_follows_changes_made_by_other_gateways(
    valkey_url, redis_client, tmp_path, peft_adapters
):
    async with (
        gateway_world(valkey_url, tmp_path, snapshot_interval_s=0.02) as one,
        gateway_world(valkey_url, tmp_path) as other,
    ):
        await one.push("pirate", peft_adapters["pirate"])
        assert (await other.complete("pirate")).status_code == 200
        await other.http.delete("/v1/adapters/pirate")
        assert (await one.complete("pirate")).status_code == 404

        await other.push("brief", peft_adapters["brief"])

        async def offered() -> bool:
            answer = await one.complete("brie")
            return "tiny:brief" in answer.json()["error"]["message"]

        await eventually(offered)


async def test_gateway_does_not_start_without_redis(tmp_path):
    app = create_app(GatewaySettings(redis_url="unix:///nowhere.sock", store_dir=tmp_path))

    with pytest.raises(RegistryBroken):
        async with app.router.lifespan_context(app):
            pass
