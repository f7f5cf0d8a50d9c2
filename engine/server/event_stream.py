"""Server-sent events, and answers that end when their client has gone."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapters.http_protocol import send_of_pieces
from engine.errors import EngineError
from engine.server.errors import ClientGone, error_body, internal_error, log_unforeseen

PING_AFTER_S = 10.0
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

ResultT = TypeVar("ResultT")


def event(value: Any) -> bytes:
    """One event with a JSON value."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Do `work`, or cancel it and raise ClientGone as soon as the client disconnects.

    The request's body must have been read. When this returns or raises, `work` has ended.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStreamResponse(Response):
    """Streams events from a generator, which is closed whatever happens.

    An error after the first byte becomes an error event, then `[DONE]`. `on_close` runs once the
    stream has ended, been cancelled or lost its client.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.headers.update(headers or {})
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; returns when it is over or the client has gone."""
        try:
            await unless_gone(receive, self._send_all(scope, send))
        except (ClientGone, OSError):
            return
        finally:
            self._on_close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        send = send_of_pieces(scope, send)
        async with aclosing(self._events) as events:
            try:
                async for piece in events:
                    await _send_piece(send, piece)
            except EngineError as error:
                await _send_piece(send, event(error_body(error)))
            except OSError:
                raise
            except Exception as problem:  # noqa: BLE001  the status line is already sent
                log_unforeseen(problem)
                await _send_piece(send, event(error_body(internal_error())))
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _send_piece(send: Send, piece: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": piece, "more_body": True})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
