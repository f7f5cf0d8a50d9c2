"""Our own workers: adapters by path; public names, salts and tenants by header."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from gateway.errors import WorkerBroken
from gateway.workers.client import WorkerAnswer, WorkerClient, WorkerStream
from gateway.workers.drivers.base import ProbeAnswer, WorkerDriver, WorkerRequest
from gateway.workers.placement import WorkerView
from gateway.workers.refusals import as_refusal, is_unknown_adapter, without_path

STATUS_S = 5.0
DRAIN_POLL_S = 0.1
CONFLICT = 409
MODEL_HEADER = "x-loraplex-model"
SALT_HEADER = "x-loraplex-salt"
TENANT_HEADER = "x-loraplex-tenant"
_Key = tuple[str, str, str]


class LoraplexDriver(WorkerDriver):
    """Loads versions from the store's directory, once per worker instance and version.

    `_loads` holds the flight of each key while it lasts, and then the fact that it landed, until
    the worker says otherwise or starts anew. Only this class writes it.
    """

    def __init__(
        self, client: WorkerClient, *, path_of: Callable[[str], Path], load_timeout_s: float
    ) -> None:
        self._client = client
        self._path_of = path_of
        self._load_timeout_s = load_timeout_s
        self._loads: dict[_Key, asyncio.Task[None]] = {}

    async def ensure_loaded(self, worker: WorkerView, *, lora_id: str, digest: str) -> None:
        key = (worker.worker_id, worker.instance, lora_id)
        flight = self._loads.get(key)
        if flight is None:
            self._forget_other_instances(worker)
            flight = asyncio.create_task(self._load(worker, lora_id=lora_id, digest=digest))
            self._loads[key] = flight
            flight.add_done_callback(lambda done: self._landed(key, done))
        await asyncio.shield(flight)

    def forget_loaded(self, worker: WorkerView, *, lora_id: str) -> None:
        key = (worker.worker_id, worker.instance, lora_id)
        flight = self._loads.get(key)
        if flight is not None and flight.done():
            del self._loads[key]

    async def unload(self, worker: WorkerView, *, lora_id: str) -> None:
        self.forget_loaded(worker, lora_id=lora_id)
        answer = await self._client.post(
            worker.address,
            "/v1/unload_lora_adapter",
            {"lora_name": lora_id},
            timeout_s=self._load_timeout_s,
        )
        if answer.status not in {200, 404}:
            raise as_refusal(answer)

    async def probe(self, worker: WorkerView, *, lora_id: str) -> ProbeAnswer | None:
        answer = await self._client.post(
            worker.address,
            "/internal/probe",
            {"lora_name": lora_id},
            timeout_s=self._load_timeout_s,
        )
        if is_unknown_adapter(answer):
            return None
        if answer.status != 200:
            raise as_refusal(answer)
        try:
            return msgspec.json.decode(answer.body, type=ProbeAnswer)
        except msgspec.MsgspecError as error:
            raise WorkerBroken("the worker's probe makes no sense") from error

    async def held(self, worker: WorkerView) -> set[str]:
        return {
            each["lora_id"]
            for each in await self._adapters(worker)
            if each["num_leases"] > 0 or each["num_claims"] > 0
        }

    async def open(self, worker: WorkerView, request: WorkerRequest) -> WorkerStream:
        headers = {
            MODEL_HEADER: request.public_model,
            SALT_HEADER: request.tenant.cache_salt,
            TENANT_HEADER: request.tenant.tenant_id,
        }
        return await self._client.open(
            worker.address, request.path, request.body, headers=headers, method=request.method
        )

    async def aclose(self) -> None:
        """End the loads that are still in flight."""
        flights = [flight for flight in self._loads.values() if not flight.done()]
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    async def _load(self, worker: WorkerView, *, lora_id: str, digest: str) -> None:
        path = str(self._path_of(digest))
        answer = await self._ask_to_load(worker, lora_id=lora_id, path=path)
        if answer.status == CONFLICT:
            # The same content was removed a moment ago, and is here again.
            await self._wait_until_drained(worker, lora_id=lora_id)
            answer = await self._ask_to_load(worker, lora_id=lora_id, path=path)
        if answer.status != 200:
            raise without_path(as_refusal(answer), path)

    async def _ask_to_load(self, worker: WorkerView, *, lora_id: str, path: str) -> WorkerAnswer:
        return await self._client.post(
            worker.address,
            "/v1/load_lora_adapter",
            {"lora_name": lora_id, "lora_path": path},
            timeout_s=self._load_timeout_s,
        )

    async def _wait_until_drained(self, worker: WorkerView, *, lora_id: str) -> None:
        """Return when the worker isn't unloading the version, or has taken too long for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._load_timeout_s):
                while True:
                    known = await self._adapters(worker)
                    if not any(
                        each["lora_id"] == lora_id and each["state"] == "draining" for each in known
                    ):
                        return
                    await asyncio.sleep(DRAIN_POLL_S)

    async def _adapters(self, worker: WorkerView) -> list[dict[str, Any]]:
        """Ask the worker for every version that it knows, as it truly is."""
        answer = await self._client.get(worker.address, "/internal/status", timeout_s=STATUS_S)
        if answer.status != 200:
            raise as_refusal(answer)
        adapters: list[dict[str, Any]] = (answer.json() or {}).get("adapters", [])
        return adapters

    def _landed(self, key: _Key, flight: asyncio.Task[None]) -> None:
        failed = flight.cancelled() or flight.exception() is not None
        if failed and self._loads.get(key) is flight:
            del self._loads[key]

    def _forget_other_instances(self, worker: WorkerView) -> None:
        old = [
            key
            for key, flight in self._loads.items()
            if key[0] == worker.worker_id and key[1] != worker.instance and flight.done()
        ]
        for key in old:
            del self._loads[key]
