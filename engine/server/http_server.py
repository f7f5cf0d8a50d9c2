"""uvicorn on a socket that is bound before anything slow begins."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from adapters.http_protocol import BoundedHttp
from engine.server.settings import InvalidSettings

DRAIN_TIMEOUT_S = 20


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: it would end the process by the signal's own status."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `drain_on_signals`."""
        yield


def create_http_server(app: ASGIApp) -> HttpServer:
    """A server that logs no requests and waits a while for those that run when it ends."""
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        timeout_keep_alive=75,
    )
    return HttpServer(config)


def drain_on_signals(server: HttpServer, on_drain: Callable[[], None]) -> None:
    """Let SIGTERM and SIGINT end the server softly, and a second one at once."""

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
        server.should_exit = True
        on_drain()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


def bind(host: str, port: int) -> socket.socket:
    """Take the port now, so that a taken one is known before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as problem:
        reason = problem.strerror or "unknown error"
        raise InvalidSettings(
            f"can't listen on {host} port {port} ({reason.lower()}); choose another --port"
        ) from problem
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """The URL under which others reach the socket."""
    port = listener.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  compared, not bound
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
