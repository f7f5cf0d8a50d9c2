"""One HTTP/1.1 connection to a worker: a request out, the pieces of its answer in."""

import asyncio
from typing import cast

import httptools
import httpx

# What may lie here unread before the worker has to wait.
MAX_UNREAD_BYTES = 256 * 1024

Headers = list[tuple[bytes, bytes]]


class Connection(asyncio.Protocol):
    """Carries one exchange after another; the next may begin when `is_reusable`.

    All of a body that has come since the last look is one piece, so that a gateway that is behind
    has less to do. Raises httpx's errors.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._problem: httpx.TransportError | None = None
        self._status: int | None = None
        self._headers: Headers = []
        self._has_body = True
        self._pieces: list[bytes] = []
        self._num_unread_bytes = 0
        self._is_whole = True
        self._is_kept_alive = True

    @property
    def is_reusable(self) -> bool:
        """Tell whether all of the last exchange is over, and both sides are still there."""
        transport = self._sure_transport
        is_read = self._is_whole and not self._pieces
        is_sent = not transport.get_write_buffer_size()
        return is_read and is_sent and self._is_kept_alive and not transport.is_closing()

    async def exchange(self, request: bytes, *, silence_s: float | None) -> tuple[int, Headers]:
        """Send a whole request; return the status and headers of its answer."""
        assert self._is_whole, "one exchange after another"
        self._is_whole, self._status = False, None
        self._has_body = not request.startswith(b"HEAD ")
        self._sure_transport.write(request)
        while self._status is None:
            await self._wait_for_more(silence_s)
        return self._status, self._headers

    async def next_piece(self, *, silence_s: float | None) -> bytes | None:
        """Return what has come of the body, or None after its end."""
        while not self._pieces:
            if self._is_whole:
                return None
            await self._wait_for_more(silence_s)
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._num_unread_bytes > MAX_UNREAD_BYTES:
            self._sure_transport.resume_reading()
        self._num_unread_bytes = 0
        return piece

    def close(self) -> None:
        """End the connection now, with whatever it carries."""
        self._sure_transport.abort()

    @property
    def _sure_transport(self) -> asyncio.Transport:
        assert self._transport is not None, "connected before it is used"
        return self._transport

    async def _wait_for_more(self, silence_s: float | None) -> None:
        if self._problem is not None:
            raise self._problem
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if silence_s is None else loop.call_later(silence_s, self._give_up)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _give_up(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(httpx.ReadTimeout("no byte within the limit"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._problem = httpx.RemoteProtocolError(f"not an HTTP answer: {error}")
            self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._status is not None and not _has_length(self._headers):
            self._is_whole = True
        elif self._problem is None:
            self._problem = httpx.ReadError(f"the connection was closed: {exc or 'by the worker'}")
        self._wake()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise ValueError("an answer that nobody asked for")
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # others only announce it
            self._status = status
            if not self._has_body:  # which the parser would wait for
                self._is_whole, self._is_kept_alive = True, False

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_unread_bytes += len(body)
        if self._num_unread_bytes > MAX_UNREAD_BYTES:
            self._sure_transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._status is not None and self._has_body:
            self._is_whole = True
            self._is_kept_alive = self._parser.should_keep_alive()


def _has_length(headers: Headers) -> bool:
    """Tell whether a body says itself where it ends; else the connection's end is its own."""
    return any(name.lower() in {b"content-length", b"transfer-encoding"} for name, _ in headers)
