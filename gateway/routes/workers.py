"""The workers of the cluster, for operators."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin_types import WorkerInfo, WorkerList
from gateway.responses import json_response
from gateway.route_spec import RouteSpec
from gateway.services import Gateway, gateway_of
from gateway.tenancy.keys import Access
from gateway.workers.client import WorkerCallFailed
from gateway.workers.placement import WorkerView

STATUS_TIMEOUT_S = 2.0


async def list_workers(request: Request) -> Response:
    """List all workers, each with what its core says right now."""
    gateway = gateway_of(request)
    workers = sorted(gateway.pool.views(), key=lambda worker: worker.worker_id)
    statuses = await asyncio.gather(*(_status(gateway, worker) for worker in workers))
    infos = [_info(worker, status) for worker, status in zip(workers, statuses, strict=True)]
    return json_response(WorkerList(data=infos))


async def _status(gateway: Gateway, worker: WorkerView) -> dict[str, Any] | None:
    try:
        answer = await gateway.client.get(
            worker.address, "/internal/status", timeout_s=STATUS_TIMEOUT_S
        )
    except WorkerCallFailed:
        return None
    document = answer.json()
    return document if answer.status == 200 and isinstance(document, dict) else None


def _info(worker: WorkerView, status: dict[str, Any] | None) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker.worker_id,
        kind=worker.kind,
        address=worker.address,
        base_id=worker.base_id,
        base_identity=worker.base_identity,
        instance=worker.instance,
        state="suspect" if worker.is_suspect else "ready",
        num_running=worker.num_running,
        num_waiting=worker.num_waiting,
        num_free_blocks=worker.num_free_blocks,
        num_blocks=worker.num_blocks,
        resident=sorted(worker.resident),
        disk=sorted(worker.disk),
        status=status,
    )


ROUTES = [
    RouteSpec(
        method="GET",
        path="/v1/workers",
        endpoint=list_workers,
        access=Access.ADMIN,
        summary="List the workers: address, load and residency.",
        response=WorkerList,
    ),
]
