"""Giving an adapter up: the name at once, its traces at the workers in the background."""

import logging
from collections.abc import Collection

from gateway.errors import GatewayError
from gateway.services import Gateway
from gateway.workers.client import WorkerCallFailed
from gateway.workers.placement import WorkerView

logger = logging.getLogger(__name__)


async def remove_adapter(gateway: Gateway, name: str) -> None:
    """Retire the name. Requests in flight finish; workers are asked to unload afterwards."""
    lora_ids = await gateway.publisher.retire(name)
    gateway.background.start(_unload_everywhere(gateway, lora_ids), name="unload a removed adapter")


async def _unload_everywhere(gateway: Gateway, lora_ids: Collection[str]) -> None:
    for worker in gateway.pool.views():
        for lora_id in lora_ids:
            await _unload(gateway, worker, lora_id)


async def _unload(gateway: Gateway, worker: WorkerView, lora_id: str) -> None:
    driver = gateway.drivers.get(worker.kind)
    if driver is None:
        return
    try:
        await driver.unload(worker, lora_id=lora_id)
    except (WorkerCallFailed, GatewayError) as error:
        # It will be evicted there when room is needed; nothing routes to it any more.
        logger.warning("worker %s did not unload %s: %s", worker.worker_id, lora_id, error)
