"""The gateway's HTTP server, run inside our own event loop."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from adapters.http_protocol import BoundedHttp
from gateway.embedded.errors import ServeRefused

# Streams that still run after this are ended, so that a stop always ends.
DRAIN_TIMEOUT_S = 30
# How long an idle connection is kept: longer than clients keep theirs (httpx and with it the OpenAI
# SDK 5 s, as uvicorn would), or one may be closed in the moment in which it is used again.
KEEP_ALIVE_S = 75
POLL_S = 0.01


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the command decides what a signal means."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, or raise ServeRefused where uvicorn would end the whole process."""
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise ServeRefused("the gateway couldn't start; its log says why") from error


class GatewayServer:
    """Serves `app` on a listening socket from start to stop."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                log_config=None,
                access_log=False,
                lifespan="on",
                server_header=False,
                timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once requests are answered; raises ServeRefused if the app can't start."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                failed, self._task = self._task, None
                failed.result()
                raise ServeRefused("the gateway ended while it started; its log says why")
            await asyncio.sleep(POLL_S)

    async def wait(self) -> None:
        """Return, or raise, when the server has ended."""
        assert self._task is not None, "start comes first"
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Refuse new connections, finish running requests, end."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()
