"""Whether the gateway can serve, and its counters."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin_types import Health
from gateway.metrics import CONTENT_TYPE
from gateway.responses import json_response
from gateway.route_spec import RouteSpec
from gateway.services import gateway_of
from gateway.tenancy.keys import Access


async def health(request: Request) -> Response:
    """Answer 200 when a request could be served now: there is a worker."""
    gateway = gateway_of(request)
    num_workers = sum(not worker.is_suspect for worker in gateway.pool.views())
    document = Health(
        status="ok" if num_workers else "no_worker",
        registry="ok" if gateway.reader.is_fresh else "unreachable",
        workers=num_workers,
    )
    return json_response(document, status=200 if num_workers else 503)


async def metrics(request: Request) -> Response:
    """Render the gateway's own metrics."""
    gateway = gateway_of(request)
    workers = gateway.pool.views()
    gateway.metrics.workers.set(len(workers))
    gateway.metrics.worker_load.labels("running").set(sum(w.num_running for w in workers))
    gateway.metrics.worker_load.labels("waiting").set(sum(w.num_waiting for w in workers))
    return Response(gateway.metrics.render(), media_type=CONTENT_TYPE)


ROUTES = [
    RouteSpec(
        method="GET",
        path="/health",
        endpoint=health,
        access=Access.PUBLIC,
        summary="Tell whether a request could be served now; 503 when there is no worker.",
        response=Health,
        statuses=(200, 503),
    ),
    RouteSpec(
        method="GET",
        path="/metrics",
        endpoint=metrics,
        access=Access.ADMIN,
        summary="The gateway's metrics, for Prometheus.",
        media_type="text/plain",
    ),
]
