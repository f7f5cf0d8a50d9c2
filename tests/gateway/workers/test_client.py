"""Errors of the HTTP library end in the client."""

import httpx
import pytest

from gateway.workers.client import WorkerCallFailed, WorkerClient, WorkerSilent, WorkerUnreachable

pytestmark = pytest.mark.anyio


def kinds_of(base: type) -> set[type]:
    return {base}.union(*(kinds_of(kind) for kind in base.__subclasses__()))


KINDS = sorted(
    (k for k in kinds_of(httpx.TransportError) if k.__module__.startswith("httpx")),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_error_of_the_library_is_translated(kind):
    def fail(request: httpx.Request) -> httpx.Response:
        raise kind("no")

    transport = httpx.MockTransport(fail)
    async with WorkerClient(cluster_token=None, silence_s=1, transport=transport) as client:
        with pytest.raises(WorkerCallFailed) as caught:
            await client.open("http://worker", "/x", b"{}")

    is_slow = issubclass(kind, httpx.TimeoutException) and kind is not httpx.ConnectTimeout
    assert isinstance(caught.value, WorkerSilent if is_slow else WorkerUnreachable)


@pytest.mark.parametrize("address", ["", "nonsense", "http://", "ftp://worker"])
async def test_address_that_is_none_is_unreachable(address):
    async with WorkerClient(cluster_token=None, silence_s=1) as client:
        with pytest.raises(WorkerUnreachable):
            await client.get(address, "/x", timeout_s=1)
