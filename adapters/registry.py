"""The registry in Redis: who owns which name, which version it means, who serves which base.

Only this module knows the keys. All of them carry one hash tag, so that each change of an adapter
is one atomic step: record, manifest and audit line together, if the generation is still the one
that the change was made from.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from adapters.base_description import BaseDescription
from adapters.errors import AdapterConflict, AdapterNotFound, RegistryBroken
from adapters.heartbeat import WorkerHeartbeat, verify
from adapters.journal import Journal, JournalEntry
from adapters.manifest import AdapterManifest
from adapters.names import ModelName, split_model_name
from adapters.record import AdapterRecord, retire, revive
from adapters.store import AdapterStore

HEARTBEAT_TTL_MS = 5000
_MAX_AUDIT_LINES = 10_000
_MAX_ATTEMPTS = 16

_RECORDS = "{lp}:adapters"
_MANIFESTS = "{lp}:manifests"
_AUDIT = "{lp}:audit"
_BASES = "{lp}:bases"
_WORKERS = "{lp}:workers"
_WORKER = "{lp}:worker:"

# KEYS records, manifests, audit
# ARGV name, generation before (0: none), record, digest or "", manifest, time, actor, action, bound
_COMMIT = """
local current = redis.call('HGET', KEYS[1], ARGV[1])
local generation = 0
if current then generation = cjson.decode(current)['generation'] end
if generation ~= tonumber(ARGV[2]) then return generation end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[2], ARGV[4], ARGV[5]) end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[9], '*', 'time', ARGV[6], 'actor', ARGV[7],
           'action', ARGV[8], 'name', ARGV[1], 'generation', cjson.decode(ARGV[3])['generation'])
return -1
"""

# KEYS records    ARGV name, generation, record: only ever forward
_RESTORE = """
local current = redis.call('HGET', KEYS[1], ARGV[1])
if current and cjson.decode(current)['generation'] >= tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSnapshot:
    """What one request needs to know, read in one round trip.

    model_name   the `model` field taken apart by the bases of this very moment; None: unknown
    record       of the adapter that it names; None when there is none, or no adapter was named
    """

    model_name: ModelName | None
    record: AdapterRecord | None
    bases: Mapping[str, BaseDescription]
    workers: tuple[WorkerHeartbeat, ...]


class AuditLine(msgspec.Struct, frozen=True, kw_only=True):
    """One change of an adapter: who did what, and when."""

    time: str
    actor: str
    action: str
    name: str
    generation: int


class AdapterRegistry:
    """Reads and changes the registry; holds no state but its connection.

    With a journal, every change is on the disk before the registry is asked to make it. With a
    cluster token, heartbeats that weren't signed with it are passed over.
    """

    def __init__(
        self, redis: Redis, *, journal: Journal | None = None, cluster_token: str | None = None
    ) -> None:
        self._redis = redis
        self._journal = journal
        self._cluster_token = cluster_token

    async def ping(self) -> None:
        """Return when Redis answers, or raise RegistryBroken."""
        with _broken():
            await _awaited(self._redis.ping())

    async def get(self, name: str) -> AdapterRecord | None:
        """Return the record of a name; None when it is unknown or has been given up."""
        record = await self._get_any(name)
        return None if record is None or record.is_retired else record

    async def list(self) -> tuple[AdapterRecord, ...]:
        """Return the records of all living names, by name."""
        with _broken():
            raw = await _awaited(self._redis.hgetall(_RECORDS))
            records = [_record(value) for value in raw.values()]
        return tuple(sorted((r for r in records if not r.is_retired), key=lambda r: r.name))

    async def manifests(self, digests: Collection[str]) -> dict[str, AdapterManifest]:
        """Return the manifests of those digests that are known."""
        wanted = [*dict.fromkeys(digests)]
        if not wanted:
            return {}
        with _broken():
            found = await _awaited(self._redis.hmget(_MANIFESTS, wanted))
            decoded = [m and msgspec.json.decode(m, type=AdapterManifest) for m in found]
        return {digest: m for digest, m in zip(wanted, decoded, strict=True) if m}

    async def commit(
        self,
        before: AdapterRecord | None,
        after: AdapterRecord,
        manifest: AdapterManifest | None = None,
        *,
        actor: str,
        action: str,
    ) -> AdapterRecord:
        """Put `after` in the place of `before`, and return the record as it now stands.

        Raises AdapterConflict, with nothing changed, when `before` is no longer what stands there.
        A name that was given up continues: its numbers and generations go on.
        """
        if before is None:
            existing = await self._get_any(after.name)
            if existing is not None and existing.is_retired:
                before, after = existing, revive(existing, after)
        if before is not None and before.generation == after.generation:
            await self._put_manifest(manifest)
            return before
        after.check_invariants()
        entry = self._entry(after, actor=actor, action=action)
        await self._append(entry)
        generation = await self._swap(before, after, manifest, entry)
        if generation >= 0:
            await self._append(
                JournalEntry(entry_id=_new_id(), created=_now(), withdraws=entry.entry_id)
            )
            raise AdapterConflict(
                f"{after.name!r} has been changed by someone else: its generation is "
                f"{generation}, not {0 if before is None else before.generation}"
            )
        return after

    async def update(
        self,
        name: str,
        change: Callable[[AdapterRecord | None], AdapterRecord],
        manifest: AdapterManifest | None = None,
        *,
        actor: str,
        action: str,
    ) -> AdapterRecord:
        """Apply a pure change to a name, again from the newest record when someone was faster.

        `change` gets None for a name that is unknown or given up; what it raises passes through.
        """
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            before = await self.get(name)
            after = change(before)
            try:
                return await self.commit(before, after, manifest, actor=actor, action=action)
            except AdapterConflict:
                if attempt == _MAX_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def remove(self, name: str, *, actor: str = "") -> AdapterRecord:
        """Give a name up and return its record as it was before."""
        removed: list[AdapterRecord] = []

        def change(record: AdapterRecord | None) -> AdapterRecord:
            if record is None:
                raise AdapterNotFound(f"there is no adapter {name!r}")
            removed.append(record)
            return retire(record)

        await self.update(name, change, actor=actor, action="remove")
        return removed[-1]

    async def audit(self, *, num_lines: int = 100) -> tuple[AuditLine, ...]:
        """Return the newest changes, the newest first."""
        with _broken():
            lines = await _awaited(self._redis.xrevrange(_AUDIT, count=num_lines))
            texts = [{_text(k): _text(v) for k, v in fields.items()} for _, fields in lines]
            return tuple(msgspec.convert(t, type=AuditLine, strict=False) for t in texts)

    async def bases(self) -> dict[str, BaseDescription]:
        """Return every base that a worker has ever announced, by its id."""
        with _broken():
            return _bases(await _awaited(self._redis.hgetall(_BASES)))

    async def put_base(self, base: BaseDescription) -> None:
        """Announce a base's module table, so that uploads need no worker."""
        with _broken():
            await _awaited(self._redis.hset(_BASES, base.base_id, _encode(base)))

    async def put_heartbeat(
        self, heartbeat: WorkerHeartbeat, *, ttl_ms: int = HEARTBEAT_TTL_MS
    ) -> None:
        """Say that a worker lives; it is forgotten `ttl_ms` after the last time."""
        with _broken():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.sadd(_WORKERS, heartbeat.worker_id)
            pipeline.set(_WORKER + heartbeat.worker_id, _encode(heartbeat), px=ttl_ms)
            await pipeline.execute()

    async def remove_worker(self, worker_id: str) -> None:
        """Forget a worker that says goodbye."""
        with _broken():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.delete(_WORKER + worker_id)
            pipeline.srem(_WORKERS, worker_id)
            await pipeline.execute()

    async def workers(self) -> tuple[WorkerHeartbeat, ...]:
        """Return the last heartbeat of every living worker, by worker id."""
        with _broken():
            return self._heartbeats(await _awaited(_sort_workers(self._redis)))

    async def snapshot_for_routing(self, model: str) -> RoutingSnapshot:
        """Read all that routing a request for `model` needs in one pipelined round trip."""
        candidates = _candidate_names(model)
        with _broken():
            pipeline = self._redis.pipeline(transaction=False)
            pipeline.hgetall(_BASES)
            pipeline.hmget(_RECORDS, candidates or ["-"])
            _sort_workers(pipeline)
            raw_bases, raw_records, raw_workers = await pipeline.execute()
            bases = _bases(raw_bases)
            records = [_record(raw) for raw in raw_records if raw is not None]
        model_name = split_model_name(model, bases)
        wanted = None if model_name is None else model_name.adapter_name
        living = (r for r in records if r.name == wanted and not r.is_retired)
        return RoutingSnapshot(
            model_name=model_name,
            record=next(living, None),
            bases=bases,
            workers=self._heartbeats(raw_workers),
        )

    async def rebuild(self, journal: Journal, store: AdapterStore) -> tuple[str, ...]:
        """Restore from the journal every record that Redis lacks or holds an older state of.

        Versions whose bytes are gone stay in the record; loading them says so. Returns the names.
        """
        restored: list[str] = []
        for name, record in (await asyncio.to_thread(journal.latest_records)).items():
            with _broken():
                is_new = await _awaited(
                    self._redis.eval(
                        _RESTORE, 1, _RECORDS, name, str(record.generation), _encode(record)
                    )
                )
            if is_new:
                restored.append(name)
                await self._restore_manifests(record, store)
        return tuple(restored)

    async def _put_manifest(self, manifest: AdapterManifest | None) -> None:
        if manifest is not None:
            with _broken():
                await _awaited(self._redis.hset(_MANIFESTS, manifest.digest, _encode(manifest)))

    async def _restore_manifests(self, record: AdapterRecord, store: AdapterStore) -> None:
        for entry in record.versions:
            if await asyncio.to_thread(store.has, entry.digest):
                await self._put_manifest(await asyncio.to_thread(store.manifest, entry.digest))

    async def _get_any(self, name: str) -> AdapterRecord | None:
        with _broken():
            raw = await _awaited(self._redis.hget(_RECORDS, name))
            return None if raw is None else _record(raw)

    async def _swap(
        self,
        before: AdapterRecord | None,
        after: AdapterRecord,
        manifest: AdapterManifest | None,
        entry: JournalEntry,
    ) -> int:
        """Return -1 when the swap was made, else the generation that stands there."""
        arguments: list[str | bytes] = [
            after.name,
            "0" if before is None else str(before.generation),
            _encode(after),
            "" if manifest is None else manifest.digest,
            b"" if manifest is None else _encode(manifest),
            entry.created,
            entry.actor,
            entry.action,
            str(_MAX_AUDIT_LINES),
        ]
        with _broken():
            keys = (_RECORDS, _MANIFESTS, _AUDIT)
            result = await _awaited(self._redis.eval(_COMMIT, len(keys), *keys, *arguments))
        return int(result)

    def _entry(self, record: AdapterRecord, *, actor: str, action: str) -> JournalEntry:
        return JournalEntry(
            entry_id=_new_id(), created=_now(), record=record, actor=actor, action=action
        )

    async def _append(self, entry: JournalEntry) -> None:
        if self._journal is not None:
            await asyncio.to_thread(self._journal.append, entry)

    def _heartbeats(self, values: Collection[bytes | None]) -> tuple[WorkerHeartbeat, ...]:
        heartbeats = [msgspec.json.decode(value, type=WorkerHeartbeat) for value in values if value]
        trusted = (h for h in heartbeats if verify(h, self._cluster_token))
        return tuple(sorted(trusted, key=lambda heartbeat: heartbeat.worker_id))


@contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise RegistryBroken(f"the registry doesn't answer: {error}") from error
    except msgspec.MsgspecError as error:
        raise RegistryBroken(f"the registry holds a value that can't be read: {error}") from error


async def _awaited(answer: Awaitable[Any] | Any) -> Any:
    """Await a command; redis types its commands as sync and async at once."""
    return await cast(Awaitable[Any], answer)


def _sort_workers(redis: Any) -> Any:
    return redis.sort(_WORKERS, by="nosort", get=_WORKER + "*")


def _candidate_names(model: str) -> list[str]:
    """Every adapter name that `model` could mean, whatever the bases are."""
    starts = [0, *(match.end() for match in re.finditer(":", model[:4096]))]
    names = (model[start:].partition("@")[0] for start in starts)
    return [name for name in dict.fromkeys(names) if 0 < len(name) <= 128 and ":" not in name]


def _bases(raw: Mapping[Any, bytes]) -> dict[str, BaseDescription]:
    decoded = (msgspec.json.decode(value, type=BaseDescription) for value in raw.values())
    return {base.base_id: base for base in decoded}


def _record(raw: bytes) -> AdapterRecord:
    return msgspec.json.decode(raw, type=AdapterRecord)


def _encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _new_id() -> str:
    return uuid.uuid4().hex
