"""Health, models, metrics and what a gateway asks a worker."""

import asyncio
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import CoreBroken
from engine.protocol import CoreStatus
from engine.server.parsing import read_body
from engine.server.worker import Worker, worker_of

_STATUS_TIMEOUT_S = 2.0


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which version is probed."""

    lora_name: str


async def health(request: Request) -> Response:
    """200 while requests are taken."""
    worker = worker_of(request)
    if worker.is_draining:
        raise CoreBroken("the worker is shutting down")
    _ = worker.core
    return _json({"status": "ok"})


async def models(request: Request) -> Response:
    """The base first, then each version this worker knows, with the base as parent."""
    worker = worker_of(request)
    core = worker.core
    status = await core.client.status()
    data = [_card(worker, core.model.base_id, parent=None)]
    data += [_card(worker, each.lora_id, parent=core.model.base_id) for each in status.adapters]
    return _json({"object": "list", "data": data})


async def metrics(request: Request) -> Response:
    """Prometheus text. While the core is away, or busy with a long step, its part is left out."""
    worker = worker_of(request)
    status, model_name = None, ""
    if worker.supervisor.is_serving:
        model_name = worker.core.model.base_id
        status = await _status_soon(worker)
    text = worker.metrics.expose(
        status,
        model_name=model_name,
        num_core_starts=worker.supervisor.num_starts,
        max_num_seqs=worker.settings.engine.max_num_seqs,
    )
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def internal_status(request: Request) -> Response:
    """The core's counters and gauges, and which start of it they belong to."""
    core = worker_of(request).core
    status = await core.client.status()
    return _json({**msgspec.to_builtins(status), "instance": core.instance})


async def internal_base(request: Request) -> Response:
    """The base's module table."""
    return _json(worker_of(request).core.model.describe())


async def internal_probe(request: Request) -> Response:
    """Whether a version that is loaded here changes what the model says; see ProbeResult."""
    worker = worker_of(request)
    body = await read_body(request, ProbeRequest)
    return _json(await worker.core.client.probe_adapter(body.lora_name))


async def _status_soon(worker: Worker) -> CoreStatus | None:
    try:
        async with asyncio.timeout(_STATUS_TIMEOUT_S):
            return await worker.core.client.status()
    except (TimeoutError, CoreBroken):
        return None


def _card(worker: Worker, model_id: str, *, parent: str | None) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": worker.created,
        "owned_by": "loraplex",
        "root": model_id,
        "parent": parent,
        "max_model_len": worker.core.model.max_model_len,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
