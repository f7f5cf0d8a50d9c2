"""The HTTP server in our own loop: it drains, and says so when it can't start."""

import asyncio
import logging

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from gateway.cli.gateway_server import GatewayServer
from gateway.cli.listening import bind, url_of
from gateway.embedded.errors import ServeRefused

pytestmark = pytest.mark.anyio


async def refuses_connections(url: str) -> None:
    """Return once a new connection is refused."""
    async with asyncio.timeout(10):
        while True:
            try:
                async with httpx.AsyncClient(trust_env=False) as late:
                    await late.get(url + "/none")
            except httpx.TransportError:
                return


async def test_running_stream_is_finished_and_new_connections_are_refused():
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def words():
        yield b"first "
        begun.set()
        await go_on.wait()
        yield b"last"

    async def stream(request):
        return StreamingResponse(words())

    listener = bind("127.0.0.1", 0)
    url = url_of(listener)
    server = GatewayServer(Starlette(routes=[Route("/", stream)]), listener)
    await server.start()
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        answer = asyncio.create_task(client.get("/"))
        await begun.wait()
        stopping = asyncio.create_task(server.stop())
        await refuses_connections(url)
        go_on.set()

        assert (await answer).text == "first last"

    await stopping


@pytest.mark.slow  # idles for as long as uvicorn by itself would keep a connection
async def test_an_idle_connection_outlives_what_clients_keep_theirs_for():
    async def hello(request):
        return StreamingResponse(iter([b"hello"]))

    listener = bind("127.0.0.1", 0)
    server = GatewayServer(Starlette(routes=[Route("/", hello)]), listener)
    await server.start()
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    for pause_s in (5.5, 0.0):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(pause_s)
    writer.close()
    await server.stop()


async def test_app_that_cannot_start_is_refused(caplog):
    async def lifespan(scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no registry"})

    with caplog.at_level(logging.CRITICAL):
        server = GatewayServer(lifespan, bind("127.0.0.1", 0))
        with pytest.raises(ServeRefused, match="couldn't start"):
            await server.start()
    await server.stop()


def test_wildcard_address_is_called_by_its_loopback():
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_second_listener_on_a_port_is_refused():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServeRefused, match=f"port {port} on 127.0.0.1 is taken"):
            bind("127.0.0.1", port)


def test_host_that_is_no_name_is_refused():
    with pytest.raises(ServeRefused, match="isn't an address of this machine"):
        bind("no such host", 0)
