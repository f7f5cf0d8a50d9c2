"""The registry against a real Valkey."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from adapters.errors import AdapterConflict, AdapterNotFound, RegistryBroken
from adapters.heartbeat import WorkerHeartbeat, sign
from adapters.journal import Journal
from adapters.manifest import AdapterManifest
from adapters.record import AdapterRecord, promote, publish, resolve, retire, rollback
from adapters.registry import AdapterRegistry
from adapters.store import AdapterStore
from adapters.validate import inspect_directory
from tests.adapters.worlds import tiny_base, write_adapter

pytestmark = pytest.mark.anyio


@pytest.fixture
def registry(redis_client: Redis) -> AdapterRegistry:
    return AdapterRegistry(redis_client)


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def added(record: AdapterRecord | None, number: int, name: str = "json") -> AdapterRecord:
    return publish(record, name=name, base_id="tiny", digest=digest(number), created="t")


def manifest(number: int) -> AdapterManifest:
    return AdapterManifest(
        digest=digest(number),
        base_id="tiny",
        base_identity="sha256:00",
        dtype="F32",
        max_rank=4,
        rows={"attention": 4},
        num_modules=4,
        num_possible_modules=14,
        targets=["q_proj"],
        num_bytes=100,
        created="t",
    )


def heartbeat(worker_id: str) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker_id=worker_id,
        address="http://127.0.0.1:1",
        base_id="tiny",
        base_identity="sha256:00",
        instance="i",
    )


async def test_record_manifest_and_audit_line_arrive_together(registry: AdapterRegistry) -> None:
    record = await registry.commit(None, added(None, 1), manifest(1), actor="ann", action="publish")

    assert await registry.get("json") == record == added(None, 1)
    assert await registry.manifests([digest(1), digest(2)]) == {digest(1): manifest(1)}
    (line,) = await registry.audit()
    assert (line.actor, line.action, line.name, line.generation) == ("ann", "publish", "json", 1)


async def test_a_record_survives_the_round_trip_whole(registry: AdapterRegistry) -> None:
    record = promote(added(added(None, 1), 2), alias="default", version_ref="v2")
    record = promote(record, alias="prod", version_ref="v1")
    first = await registry.commit(None, record, actor="", action="")
    assert await registry.get("json") == first
    assert rollback(first).aliases == rollback(record).aliases


async def test_a_stale_change_is_refused_and_changes_nothing(registry: AdapterRegistry) -> None:
    first = await registry.commit(None, added(None, 1), actor="", action="")
    second = await registry.commit(first, added(first, 2), actor="", action="")
    with pytest.raises(AdapterConflict, match="generation is 2, not 1"):
        await registry.commit(first, added(first, 3), manifest(3), actor="", action="")
    with pytest.raises(AdapterConflict):
        await registry.commit(None, added(None, 3), actor="", action="")

    assert await registry.get("json") == second
    assert await registry.manifests([digest(3)]) == {}
    assert len(await registry.audit()) == 2


async def test_a_change_that_changes_nothing_is_no_step(registry: AdapterRegistry) -> None:
    first = await registry.commit(None, added(None, 1), actor="", action="")
    assert await registry.commit(first, added(first, 1), actor="", action="") is first
    assert len(await registry.audit()) == 1


async def test_concurrent_updates_all_take_effect(registry: AdapterRegistry) -> None:
    await asyncio.gather(
        *(
            registry.update(
                "json", lambda record, n=number: added(record, n), actor="", action="publish"
            )
            for number in range(8)
        )
    )
    record = await registry.get("json")
    assert record is not None
    assert record.generation == 8
    assert [entry.number for entry in record.versions] == list(range(1, 9))
    assert {entry.digest for entry in record.versions} == {digest(n) for n in range(8)}


async def test_of_concurrent_first_uploads_one_becomes_the_default(
    redis_client: Redis,
) -> None:
    registries = [AdapterRegistry(redis_client) for _ in range(5)]
    results = await asyncio.gather(
        *(r.commit(None, added(None, n), actor="", action="") for n, r in enumerate(registries)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, AdapterRecord) for result in results) == 1
    assert sum(isinstance(result, AdapterConflict) for result in results) == 4


async def test_what_a_change_raises_passes_through(registry: AdapterRegistry) -> None:
    with pytest.raises(AdapterNotFound):
        await registry.remove("json")
    await registry.commit(None, added(None, 1), actor="", action="")

    def refuse(record: AdapterRecord | None) -> AdapterRecord:
        assert record is not None
        return rollback(record)

    with pytest.raises(AdapterConflict, match="nothing to go back to"):
        await registry.update("json", refuse, actor="", action="")


async def test_a_removed_name_is_unknown_and_its_numbers_never_return(
    registry: AdapterRegistry,
) -> None:
    first = await registry.commit(None, added(None, 1), actor="", action="")
    assert await registry.remove("json", actor="ann") == first
    assert await registry.get("json") is None
    assert await registry.list() == ()

    again = await registry.commit(None, added(None, 2), actor="", action="")

    assert (resolve(again).label, resolve(again).digest) == ("v2", digest(2))
    assert again.generation == 3
    with pytest.raises(AdapterConflict):
        await registry.commit(first, added(first, 3), actor="", action="")


async def test_living_names_are_listed_in_order(registry: AdapterRegistry) -> None:
    for name in ("b", "a", "c"):
        await registry.commit(None, added(None, 1, name), actor="", action="")
    await registry.remove("b")
    assert [record.name for record in await registry.list()] == ["a", "c"]


async def test_bases_are_remembered(registry: AdapterRegistry) -> None:
    await registry.put_base(tiny_base())
    await registry.put_base(tiny_base(base_id="other", lora_rows={"mlp": 3}))
    bases = await registry.bases()
    assert bases["tiny"] == tiny_base()
    assert bases["other"].lora_rows == {"mlp": 3}


async def test_a_worker_lives_as_long_as_its_heartbeat(registry: AdapterRegistry) -> None:
    await registry.put_heartbeat(heartbeat("w-2"))
    await registry.put_heartbeat(heartbeat("w-1"))
    assert [worker.worker_id for worker in await registry.workers()] == ["w-1", "w-2"]

    await registry.put_heartbeat(heartbeat("w-1"), ttl_ms=1)
    async with asyncio.timeout(5):
        while len(await registry.workers()) == 2:
            pass
    await registry.remove_worker("w-2")
    assert await registry.workers() == ()


async def test_a_heartbeat_without_the_cluster_token_is_passed_over(redis_client: Redis) -> None:
    registry = AdapterRegistry(redis_client, cluster_token="secret")
    await registry.put_heartbeat(heartbeat("forged"))
    await registry.put_heartbeat(sign(heartbeat("true"), "secret"))
    assert [worker.worker_id for worker in await registry.workers()] == ["true"]


@pytest.mark.parametrize(
    ("model", "base_id", "adapter_name", "ref"),
    [
        ("tiny", "tiny", None, None),
        ("tiny:json", "tiny", "json", None),
        ("tiny:7b:json@v1", "tiny:7b", "json", "v1"),
        ("json@sha256:000000000000", None, "json", "sha256:000000000000"),
    ],
)
async def test_routing_needs_one_look(
    model: str,
    base_id: str | None,
    adapter_name: str | None,
    ref: str | None,
    registry: AdapterRegistry,
) -> None:
    record = await registry.commit(None, added(None, 1), actor="", action="")
    await registry.put_base(tiny_base())
    await registry.put_base(tiny_base(base_id="tiny:7b"))
    await registry.put_heartbeat(heartbeat("w-1"))

    snapshot = await registry.snapshot_for_routing(model)

    found = snapshot.model_name
    assert found is not None
    assert (found.base_id, found.adapter_name, found.version_ref) == (base_id, adapter_name, ref)
    assert snapshot.record == (record if adapter_name else None)
    assert set(snapshot.bases) == {"tiny", "tiny:7b"}
    assert [worker.worker_id for worker in snapshot.workers] == ["w-1"]


@pytest.mark.parametrize("model", ["", ":", "nobody", "tiny:nobody", "a" * 5000, "\0", "@v1"])
async def test_routing_an_unknown_model_finds_no_record(
    model: str, registry: AdapterRegistry
) -> None:
    record = await registry.commit(None, added(None, 1), actor="", action="")
    await registry.remove(record.name)
    assert (await registry.snapshot_for_routing(model)).record is None
    assert (await registry.snapshot_for_routing("json")).record is None


async def test_a_client_that_decodes_is_as_good(valkey_url: str, redis_client: Redis) -> None:
    client = Redis.from_url(valkey_url, decode_responses=True)
    registry = AdapterRegistry(client)
    await registry.put_base(tiny_base())
    record = await registry.commit(None, added(None, 1), manifest(1), actor="a", action="b")
    assert await AdapterRegistry(redis_client).get("json") == record == await registry.get("json")
    assert len(await registry.audit()) == 1
    await client.aclose()


async def test_a_registry_that_is_away_is_the_operators_matter(tmp_path: Path) -> None:
    client = Redis.from_url(f"unix://{tmp_path}/nobody")
    registry = AdapterRegistry(client)
    with pytest.raises(RegistryBroken, match="doesn't answer"):
        await registry.ping()
    with pytest.raises(RegistryBroken):
        await registry.snapshot_for_routing("x")
    await client.aclose()


async def test_nonsense_in_the_registry_is_the_operators_matter(
    redis_client: Redis, registry: AdapterRegistry
) -> None:
    await redis_client.hset("{lp}:adapters", "json", b"{")
    with pytest.raises(RegistryBroken, match="can't be read"):
        await registry.get("json")


async def test_everything_is_rebuilt_from_journal_and_store(
    redis_client: Redis, tmp_path: Path
) -> None:
    store = AdapterStore(tmp_path)
    journal = store.journal()
    registry = AdapterRegistry(redis_client, journal=journal)
    base = tiny_base()
    with store.staging() as staged:
        kept = store.put(write_adapter(staged), inspect_directory(staged, base), base)
    record = await registry.commit(
        None,
        publish(None, name="json", base_id="tiny", digest=kept.digest, created="t"),
        kept,
        actor="",
        action="publish",
    )
    record = await registry.commit(
        record, promote(record, alias="prod", version_ref="v1"), actor="", action="promote"
    )
    await registry.commit(None, added(None, 5, "law"), actor="", action="publish")
    await registry.remove("law")
    await redis_client.flushall()

    restored = await registry.rebuild(journal, store)

    assert sorted(restored) == ["json", "law"]
    assert await registry.get("json") == record
    assert await registry.get("law") is None
    assert await registry.manifests([kept.digest]) == {kept.digest: kept}
    assert await registry.rebuild(journal, store) == ()


async def test_rebuilding_never_goes_back(redis_client: Redis, tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    first = await AdapterRegistry(redis_client, journal=store.journal()).commit(
        None, added(None, 1), actor="", action=""
    )
    elsewhere = AdapterRegistry(redis_client)
    second = await elsewhere.commit(first, added(first, 2), actor="", action="")
    assert await elsewhere.rebuild(store.journal(), store) == ()
    assert await elsewhere.get("json") == second


async def test_a_refused_change_is_withdrawn_from_the_journal(
    redis_client: Redis, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "j")
    registry = AdapterRegistry(redis_client, journal=journal)
    first = await registry.commit(None, added(None, 1), actor="", action="")
    with pytest.raises(AdapterConflict):
        await registry.commit(None, added(None, 2), actor="", action="")
    assert journal.latest_records() == {"json": first}


async def test_the_audit_stream_is_bounded(
    registry: AdapterRegistry, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapters.registry._MAX_AUDIT_LINES", 10)
    record = await registry.commit(None, added(None, 1), actor="", action="")
    record = await registry.commit(record, added(record, 2), actor="", action="")
    for _ in range(150):
        record = await registry.commit(
            record,
            promote(record, alias="prod", version_ref=f"v{1 + record.generation % 2}"),
            actor="",
            action="",
        )
    assert await redis_client.xlen("{lp}:audit") <= 120


async def test_every_key_carries_one_hash_tag(
    registry: AdapterRegistry, redis_client: Redis
) -> None:
    await registry.commit(None, added(None, 1), manifest(1), actor="", action="")
    await registry.put_base(tiny_base())
    await registry.put_heartbeat(heartbeat("w"))
    keys = [key async for key in redis_client.scan_iter()]
    assert len(keys) == 6
    assert all(key.startswith(b"{lp}:") for key in keys)


async def test_the_retired_record_keeps_its_history(registry: AdapterRegistry) -> None:
    record = await registry.commit(None, added(None, 1), actor="", action="")
    gone = retire(record)
    assert await registry.commit(record, gone, actor="", action="") == gone
    assert msgspec.json.decode(msgspec.json.encode(gone), type=AdapterRecord) == gone
