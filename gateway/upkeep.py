"""What the gateway does by itself: it keeps its local copy fresh, and Redis complete."""

import asyncio
import logging

from adapters.errors import RegistryBroken
from adapters.journal import Journal
from adapters.registry import AdapterRegistry
from adapters.store import AdapterStore
from gateway.probing import VersionProber
from gateway.registry_reader import RegistryReader

logger = logging.getLogger(__name__)

# Heartbeats are read at every round, all records at every this many.
ROUNDS_PER_FULL_READ = 5


class Upkeep:
    """Renews the reader's copy, restores what a new Redis lacks, has waiting versions probed."""

    def __init__(
        self,
        *,
        registry: AdapterRegistry,
        reader: RegistryReader,
        store: AdapterStore,
        journal: Journal,
        prober: VersionProber,
    ) -> None:
        self._registry = registry
        self._reader = reader
        self._store = store
        self._journal = journal
        self._prober = prober

    async def begin(self) -> None:
        """Restore and read everything once; raises RegistryBroken when Redis is away."""
        restored = await self._registry.rebuild(self._journal, self._store)
        if restored:
            logger.warning("restored from the journal: %s", ", ".join(restored))
        await self._reader.renew()

    async def run(self, *, interval_s: float) -> None:
        """Go on until cancelled. When Redis comes back, it may be another one: restore first."""
        is_away = False
        round_number = 0
        while True:
            await asyncio.sleep(interval_s)
            round_number += 1
            try:
                if is_away:
                    await self.begin()
                elif round_number % ROUNDS_PER_FULL_READ == 0:
                    await self._reader.renew()
                else:
                    await self._reader.renew_workers()
                is_away = False
                self._prober.begin_waiting()
            except RegistryBroken as error:
                if not is_away:
                    logger.warning("the registry is away: %s", error)
                is_away = True
