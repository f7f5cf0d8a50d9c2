"""What becomes of versions that no record keeps: workers unload them, the store lets them go."""

import asyncio
import logging
from collections.abc import Collection, Mapping

from anyio import to_thread

from adapters.manifest import lora_id
from adapters.record import AdapterRecord, VersionState
from adapters.registry import AdapterRegistry
from adapters.store import AdapterStore
from gateway.background import Background
from gateway.errors import GatewayError
from gateway.workers.client import WorkerCallFailed
from gateway.workers.drivers.base import WorkerDriver
from gateway.workers.placement import WorkerView
from gateway.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

# How long a pruned version may go on answering requests that came before it was pruned.
IDLE_POLL_S = 1.0
MAX_IDLE_POLLS = 600


class Pruner:
    """Takes versions away from workers and from the store, in the background.

    Only digests that no living record names leave the store; also when the same content is being
    published again under our hands. A worker is asked to unload only what isn't routable under
    that name at that moment: content that was given up may have come back.
    """

    def __init__(
        self,
        *,
        store: AdapterStore,
        registry: AdapterRegistry,
        pool: WorkerPool,
        drivers: Mapping[str, WorkerDriver],
        background: Background,
    ) -> None:
        self._store = store
        self._registry = registry
        self._pool = pool
        self._drivers = drivers
        self._background = background

    def unload(self, name: str, digests: Collection[str]) -> None:
        """Ask every worker to unload these versions; the store keeps them."""
        work = self._unload_everywhere(name, digests)
        self._background.start(work, name="unload versions")

    def remove(self, name: str, digests: Collection[str]) -> None:
        """Unload versions of a name that was given up, then drop what nobody names any more."""
        self._background.start(self._remove(name, digests), name="remove an adapter's versions")

    def forget(self, name: str, digests: Collection[str]) -> None:
        """Do what remove() does, but let requests that run with the versions end first."""
        self._background.start(self._forget(name, digests), name="forget pruned versions")

    async def _remove(self, name: str, digests: Collection[str]) -> None:
        await self._unload_everywhere(name, digests)
        await self.drop_unnamed(digests)

    async def _forget(self, name: str, digests: Collection[str]) -> None:
        await self.drop_unnamed(digests)
        for _ in range(MAX_IDLE_POLLS):
            if not await self._is_held(name, digests):
                break
            await asyncio.sleep(IDLE_POLL_S)
        await self._unload_everywhere(name, digests)

    async def drop_unnamed(self, digests: Collection[str]) -> None:
        """Remove from the store those of `digests` that no living record names."""
        for digest in set(digests) - await self._named():
            grave = await to_thread.run_sync(self._store.set_aside, digest)
            if grave is None:
                continue
            # Who has published it since the first look sees that it is gone, or is seen here.
            if digest in await self._named():
                await to_thread.run_sync(self._store.put_back, grave, digest)
            else:
                await to_thread.run_sync(self._store.throw_away, grave)

    async def _named(self) -> set[str]:
        return {
            entry.digest
            for record in await self._registry.list()
            for entry in record.versions
            if entry.state is not VersionState.RETIRED
        }

    async def _is_held(self, name: str, digests: Collection[str]) -> bool:
        wanted = {lora_id(name, digest) for digest in digests}
        for worker in self._pool.views():
            driver = self._drivers.get(worker.kind)
            try:
                if driver is not None and wanted & await driver.held(worker):
                    return True
            except (WorkerCallFailed, GatewayError):
                continue
        return False

    async def _unload_everywhere(self, name: str, digests: Collection[str]) -> None:
        """Have all workers unload at once, since each may take as long as its requests last."""
        record = await self._registry.get(name)
        wanted = set() if record is None else _wanted_digests(record)
        versions = [lora_id(name, digest) for digest in digests if digest not in wanted]
        unloads = [self._unload(w, version) for w in self._pool.views() for version in versions]
        await asyncio.gather(*unloads)

    async def _unload(self, worker: WorkerView, version: str) -> None:
        driver = self._drivers.get(worker.kind)
        if driver is None:
            return
        try:
            await driver.unload(worker, lora_id=version)
        except (WorkerCallFailed, GatewayError) as error:
            # It will be evicted there when room is needed; nothing routes to it any more.
            logger.warning("worker %s did not unload %s: %s", worker.worker_id, version, error)


def _wanted_digests(record: AdapterRecord) -> set[str]:
    """Return the versions that are routable, or are about to be."""
    states = {VersionState.PROBING, VersionState.ACTIVE}
    return {entry.digest for entry in record.versions if entry.state in states}
