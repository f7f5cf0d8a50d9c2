"""From a stored version to a routable one: a worker says whether it does anything."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from adapters.errors import AdapterError, AdapterInvalid, AdapterNotFound
from adapters.manifest import lora_id
from adapters.record import AdapterRecord, VersionEntry, VersionState, activate, fail, prune
from adapters.registry import AdapterRegistry
from gateway.errors import GatewayError, WorkerRefused
from gateway.pruning import Pruner
from gateway.registry_reader import RegistryReader
from gateway.workers.client import WorkerCallFailed
from gateway.workers.drivers.base import ProbeAnswer, WorkerDriver
from gateway.workers.placement import WorkerView
from gateway.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

ACTOR = "probe"
NUM_KEPT = 8
_MAX_WORKERS_ASKED = 3
_REFUSED_STATUS = 422


class AdapterHasNoEffect(AdapterInvalid):
    """Everything is well-formed, but the base would answer as before."""

    code = "adapter_has_no_effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Why a version can't become active."""

    problems: Sequence[str]
    has_no_effect: bool = False

    def as_error(self) -> AdapterInvalid:
        kind = AdapterHasNoEffect if self.has_no_effect else AdapterInvalid
        return kind(self.problems)


class VersionProber:
    """Takes versions out of the state `probing`, one flight per version however many ask.

    A version becomes active or failed by what one worker of its base says; while there is none that
    can say, it stays as it is, and begin_waiting() tries again. Old versions are pruned in the same
    step in which a new one becomes active.
    """

    def __init__(
        self,
        *,
        registry: AdapterRegistry,
        reader: RegistryReader,
        pool: WorkerPool,
        drivers: Mapping[str, WorkerDriver],
        pruner: Pruner,
    ) -> None:
        self._registry = registry
        self._reader = reader
        self._pool = pool
        self._drivers = drivers
        self._pruner = pruner
        self._flights: dict[tuple[str, str], asyncio.Task[AdapterRecord]] = {}

    async def settle(self, name: str, digest: str) -> AdapterRecord:
        """Return the record once the version is active, or still probing for lack of a worker.

        Raises AdapterHasNoEffect or AdapterInvalid when the version has failed; the record says so
        then. A caller that is cancelled leaves the probe running.
        """
        return await asyncio.shield(self._flight(name, digest))

    def begin_waiting(self) -> None:
        """Start the probe of every version that waits and whose base has a worker now."""
        served = {worker.base_id for worker in self._pool.views() if not worker.is_suspect}
        for record in self._reader.records():
            if record.base_id not in served:
                continue
            for entry in record.versions:
                if entry.state is VersionState.PROBING:
                    self._flight(record.name, entry.digest)

    async def aclose(self) -> None:
        """End the probes that are under way; their versions wait for the next gateway."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _flight(self, name: str, digest: str) -> "asyncio.Task[AdapterRecord]":
        key = (name, digest)
        flight = self._flights.get(key)
        if flight is None:
            flight = asyncio.create_task(self._probe(name, digest), name="probe a version")
            self._flights[key] = flight
            flight.add_done_callback(partial(self._landed, key))
        return flight

    def _landed(self, key: tuple[str, str], flight: "asyncio.Task[AdapterRecord]") -> None:
        self._flights.pop(key, None)
        error = None if flight.cancelled() else flight.exception()
        if isinstance(error, AdapterError | GatewayError):
            logger.info("the probe of %s: %s", key[0], error)
        elif error is not None:
            logger.error("the probe of %s failed", key[0], exc_info=error)

    async def _probe(self, name: str, digest: str) -> AdapterRecord:
        record = await self._registry.get(name)
        entry = None if record is None else record.find(digest)
        if record is None or entry is None:
            raise AdapterNotFound(f"{name!r} was removed before its probe")
        if entry.state is not VersionState.PROBING:
            return record
        verdict = await self._verdict(record, entry)
        if verdict is None:
            return record
        if isinstance(verdict, _Refusal):
            reason = "; ".join(verdict.problems)[:1000]
            await self._change(name, partial(fail, digest=digest, reason=reason), action="fail")
            self._pruner.unload(name, [digest])
            raise verdict.as_error()
        return await self._change(name, partial(_activated, digest=digest), action="activate")

    async def _verdict(
        self, record: AdapterRecord, entry: VersionEntry
    ) -> ProbeAnswer | _Refusal | None:
        """Return a good answer, a refusal, or None if no worker could say."""
        answer = await self._ask(record, entry)
        if not isinstance(answer, ProbeAnswer):
            return answer
        if not answer.is_finite:
            return _Refusal(problems=["with this adapter the model's logits aren't finite numbers"])
        if answer.has_effect:
            return answer
        manifest = (await self._registry.manifests([entry.digest])).get(entry.digest)
        if manifest is not None and manifest.allows_no_effect:
            return answer
        problem = (
            f"the adapter has no effect: beside the base in one step its logits differ by "
            f"{answer.logit_gap:.3g}, and the base's own by {answer.noise:.3g}"
        )
        return _Refusal(problems=[problem], has_no_effect=True)

    async def _ask(
        self, record: AdapterRecord, entry: VersionEntry
    ) -> ProbeAnswer | _Refusal | None:
        version = lora_id(record.name, entry.digest)
        asked: list[str] = []
        while len(asked) < _MAX_WORKERS_ASKED:
            worker = await self._pool.choose(
                base_id=record.base_id, lora_id=version, excluded=asked
            )
            driver = None if worker is None else self._drivers.get(worker.kind)
            if worker is None or driver is None:
                return None
            asked.append(worker.worker_id)
            try:
                return await self._ask_one(driver, worker, version, entry.digest)
            except WorkerRefused as error:
                if error.status == _REFUSED_STATUS:
                    return _Refusal(problems=error.problems or [str(error)])
                logger.warning("worker %s can't probe %s: %s", worker.worker_id, version, error)
            except (WorkerCallFailed, GatewayError) as error:
                logger.warning("worker %s can't probe %s: %s", worker.worker_id, version, error)
        return None

    async def _ask_one(
        self, driver: WorkerDriver, worker: WorkerView, version: str, digest: str
    ) -> ProbeAnswer:
        """Load and probe; once more if the worker has begun anew in between."""
        await driver.ensure_loaded(worker, lora_id=version, digest=digest)
        answer = await driver.probe(worker, lora_id=version)
        if answer is None:
            driver.forget_loaded(worker, lora_id=version)
            await driver.ensure_loaded(worker, lora_id=version, digest=digest)
            answer = await driver.probe(worker, lora_id=version)
        if answer is None:
            raise WorkerCallFailed("the worker forgets the adapter as soon as it is loaded")
        return answer

    async def _change(
        self, name: str, change: Callable[[AdapterRecord], AdapterRecord], *, action: str
    ) -> AdapterRecord:
        pruned: list[str] = []

        def change_living(record: AdapterRecord | None) -> AdapterRecord:
            if record is None:
                raise AdapterNotFound(f"{name!r} was removed before its probe ended")
            changed = change(record)
            kept = {entry.digest for entry in changed.versions}
            pruned[:] = [entry.digest for entry in record.versions if entry.digest not in kept]
            return changed

        record = await self._registry.update(name, change_living, actor=ACTOR, action=action)
        self._reader.learn(record)
        if pruned:
            self._pruner.forget(name, pruned)
        return record


def _activated(record: AdapterRecord, *, digest: str) -> AdapterRecord:
    return prune(activate(record, digest), num_kept=NUM_KEPT)
