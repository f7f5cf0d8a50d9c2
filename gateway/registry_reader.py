"""Reading the registry for requests, with a local copy for when Redis is away."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from adapters.base_description import BaseDescription
from adapters.errors import RegistryBroken
from adapters.heartbeat import WorkerHeartbeat
from adapters.names import ModelName, split_model_name
from adapters.record import AdapterRecord
from adapters.registry import AdapterRegistry, RoutingSnapshot
from gateway.errors import RegistryUnavailable
from gateway.metrics import GatewayMetrics
from gateway.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

# Says "snapshot" in an answer that was made without Redis.
REGISTRY_HEADER = "x-loraplex-registry"
# After a failed read the local copy serves this long before a request tries Redis again.
RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class NameView:
    """What one request's `model` means to the registry, and whether that is from a local copy."""

    model_name: ModelName | None
    record: AdapterRecord | None
    from_snapshot: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """All bases and all living records."""

    bases: Mapping[str, BaseDescription]
    records: Mapping[str, AdapterRecord]
    from_snapshot: bool


class RegistryReader:
    """Reads names for requests, and keeps the last that was read.

    One round trip per request. Only this class writes the copy, and WorkerPool's heartbeats. The
    copy answers only when Redis doesn't; what it says may be as old as Redis' last answer.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        *,
        pool: WorkerPool,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._bases: dict[str, BaseDescription] = {}
        self._records: dict[str, AdapterRecord] = {}
        self._changed_at: dict[str, float] = {}
        self._has_copy = False
        self._failed_at: float | None = None

    @property
    def is_fresh(self) -> bool:
        """True when the last read got an answer."""
        return self._has_copy and self._failed_at is None

    def public_names(self) -> list[str]:
        """Return the bases and `base:adapter` of the local copy, for near names."""
        adapters = (f"{r.base_id}:{r.name}" for r in self._records.values() if not r.is_retired)
        return [*self._bases, *adapters]

    def records(self) -> tuple[AdapterRecord, ...]:
        """Return the records of the local copy."""
        return tuple(self._records.values())

    async def for_model(self, model: str) -> NameView:
        """Take `model` apart by the bases of now, and read the adapter that it names.

        Raises RegistryUnavailable when Redis is away and nothing was ever read.
        """
        snapshot = await self._read_snapshot(model)
        if snapshot is not None:
            self._metrics.registry_reads.labels("redis").inc()
            return NameView(
                model_name=snapshot.model_name, record=snapshot.record, from_snapshot=False
            )
        self._require_copy()
        self._metrics.registry_reads.labels("snapshot").inc()
        name = split_model_name(model, self._bases)
        record = self._records.get(name.adapter_name or "") if name is not None else None
        return NameView(model_name=name, record=record, from_snapshot=True)

    async def everything(self) -> Everything:
        """Read all bases and records, from the copy if Redis is away."""
        try:
            await self.renew()
        except RegistryBroken:
            self._require_copy()
        return Everything(
            bases=dict(self._bases),
            records=dict(self._records),
            from_snapshot=not self.is_fresh,
        )

    async def renew(self) -> None:
        """Read everything into the copy, or raise RegistryBroken and keep it as it is."""
        begun_at = self._clock()
        try:
            bases = await self._registry.bases()
            records = await self._registry.list()
            workers = await self._registry.workers()
        except RegistryBroken:
            self._failed_at = self._clock()
            raise
        self._records = self._with_own_changes(records, since=begun_at)
        self._has_copy = True
        self._took(bases, workers)

    async def renew_workers(self) -> None:
        """Read the heartbeats alone, or raise RegistryBroken and keep what was known."""
        try:
            workers = await self._registry.workers()
        except RegistryBroken:
            self._failed_at = self._clock()
            raise
        self._took(self._bases, workers)

    def learn(self, record: AdapterRecord) -> None:
        """Take a record that was just committed into the copy."""
        known = self._records.get(record.name)
        if known is None or known.generation <= record.generation:
            self._records[record.name] = record
            self._changed_at[record.name] = self._clock()

    def forget(self, name: str) -> None:
        """Drop a name that was just given up from the copy."""
        self._records.pop(name, None)
        self._changed_at[name] = self._clock()

    def _with_own_changes(
        self, records: Iterable[AdapterRecord], *, since: float
    ) -> dict[str, AdapterRecord]:
        """Return what was read, but for names that changed here while it was being read."""
        found = {record.name: record for record in records}
        changed_at, self._changed_at = self._changed_at, {}
        for name, at in changed_at.items():
            if at < since:
                continue
            self._changed_at[name] = at
            if name in self._records:
                found[name] = self._records[name]
            else:
                found.pop(name, None)
        return found

    async def _read_snapshot(self, model: str) -> RoutingSnapshot | None:
        """Return what Redis says, or None if it is away or was away a moment ago."""
        if self._failed_at is not None and self._clock() < self._failed_at + RETRY_AFTER_S:
            return None
        try:
            snapshot = await self._registry.snapshot_for_routing(model)
        except RegistryBroken as error:
            logger.warning("the registry is away: %s", error)
            self._failed_at = self._clock()
            return None
        self._took(snapshot.bases, snapshot.workers)
        if snapshot.record is not None:
            self.learn(snapshot.record)
        elif snapshot.model_name is not None and snapshot.model_name.adapter_name is not None:
            self.forget(snapshot.model_name.adapter_name)
        return snapshot

    def _took(
        self, bases: Mapping[str, BaseDescription], workers: Iterable[WorkerHeartbeat]
    ) -> None:
        self._bases = dict(bases)
        self._pool.update(tuple(workers))
        self._failed_at = None

    def _require_copy(self) -> None:
        if not self._has_copy:
            raise RegistryUnavailable("the registry can't be reached, and nothing is known yet")
