"""What this worker says about itself in Redis, once a second while it serves."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine

import redis.asyncio

from adapters.errors import RegistryBroken
from adapters.heartbeat import WorkerHeartbeat, sign
from adapters.registry import AdapterRegistry
from engine.errors import CoreBroken
from engine.protocol import CoreStatus
from engine.server.core_supervisor import RunningCore
from engine.server.worker import Worker

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_STATUS_TIMEOUT_S = 0.8
_REDIS_TIMEOUT_S = 2.0


class Announcer:
    """Writes the heartbeat, and the base's description whenever Redis may not have it.

    Redis being away stops nothing: the next beat tries again. Without a core the worker is taken
    out, and by `stop` for good; a worker that is killed is forgotten when its last beat expires.
    """

    def __init__(self, worker: Worker, *, address: str, client: redis.asyncio.Redis) -> None:
        self._worker = worker
        self._address = address
        self._redis = client
        self._registry = AdapterRegistry(client)
        self._described: str | None = None
        self._status: CoreStatus | None = None
        self._is_away = False
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to beat."""
        assert self._beating is None, "start is called once"
        self._beating = asyncio.create_task(self._beat_for_ever())

    async def stop(self) -> None:
        """Stop beating and leave."""
        if self._beating is None:
            return
        self._beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._beating
        self._beating = None
        await self._guarded(self._leave())
        await self._redis.aclose()

    async def beat(self) -> None:
        """Write one heartbeat, or leave while there is no core or there won't be one for long."""
        supervisor = self._worker.supervisor
        if self._worker.is_draining or not supervisor.is_serving:
            self._status = None
            await self._guarded(self._leave())
            return
        core = supervisor.running
        with contextlib.suppress(CoreBroken):
            await self._refresh(core)
            await self._guarded(self._write(core))

    async def _beat_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            await self.beat()
            await asyncio.sleep(max(0.0, INTERVAL_S - (loop.time() - began_s)))

    async def _refresh(self, core: RunningCore) -> None:
        """Ask the core; one that is busy with a long step is described as it was."""
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT_S):
                self._status = await core.client.status()
        except TimeoutError:
            logger.debug("the core is busy; its last status is announced again")

    async def _write(self, core: RunningCore) -> None:
        if self._described != core.instance:
            await self._registry.put_base(core.model.describe())
            self._described = core.instance
        heartbeat = self._heartbeat(core)
        signed = sign(heartbeat, self._worker.settings.cluster_token)
        await self._registry.put_heartbeat(signed)

    async def _leave(self) -> None:
        await self._registry.remove_worker(self._worker.settings.worker_id)

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        """Do something with Redis; its absence is logged once, and outlived."""
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                await work
        except (RegistryBroken, TimeoutError) as problem:
            if not self._is_away:
                logger.warning("the registry can't be reached (%s)", type(problem).__name__)
            self._is_away = True
            self._described = None
        else:
            if self._is_away:
                logger.info("the registry can be reached again")
            self._is_away = False

    def _heartbeat(self, core: RunningCore) -> WorkerHeartbeat:
        status, ready = self._status, core.ready
        adapters = () if status is None else status.adapters
        return WorkerHeartbeat(
            worker_id=self._worker.settings.worker_id,
            address=self._address,
            base_id=ready.base_id,
            base_identity=ready.base_identity,
            instance=core.instance,
            num_running=0 if status is None else status.num_running_seqs,
            num_waiting=0 if status is None else status.num_waiting_seqs,
            num_free_blocks=ready.num_blocks if status is None else status.num_free_blocks,
            num_blocks=ready.num_blocks,
            resident=[each.lora_id for each in adapters if each.state == "resident"],
            disk=[
                each.lora_id
                for each in adapters
                if each.tier == "disk" and each.state != "draining"
            ],
        )
