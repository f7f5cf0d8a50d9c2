"""httpx's requests over our own connections, on which the next piece of a stream costs little."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx

from gateway.workers.connection import Connection

# Shorter than servers keep theirs, or one is closed in the moment in which it is used again.
KEEP_IDLE_S = 4.0
MAX_IDLE = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a connection leads."""

    scheme: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Idle:
    origin: Origin
    connection: Connection
    since: float


class WorkerTransport(httpx.AsyncBaseTransport):
    """Sends each request on a connection that is idle, or on a new one.

    Keeps the `connect` and `read` limits of requests; their bodies are sent as one. httpx's own
    transport sets up and takes down a dozen objects for each piece of a stream.
    """

    def __init__(self) -> None:
        self._idle: list[_Idle] = []
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions.get("timeout", {})
        sent = _as_bytes(request, await request.aread())
        origin = _origin_of(request.url)
        connection = self._take(origin) or await self._connect(origin, limits.get("connect"))
        silence_s = limits.get("read")
        try:
            status, headers = await connection.exchange(sent, silence_s=silence_s)
        except BaseException:
            connection.close()
            raise

        def release() -> None:
            self._release(origin, connection)

        body = _Body(connection, silence_s=silence_s, release=release)
        return httpx.Response(status, headers=headers, stream=body)

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().connection.close()

    def _take(self, origin: Origin) -> Connection | None:
        self._drop_useless()
        for place in reversed(range(len(self._idle))):
            if self._idle[place].origin == origin:
                return self._idle.pop(place).connection
        return None

    def _release(self, origin: Origin, connection: Connection) -> None:
        now = asyncio.get_running_loop().time()
        self._idle.append(_Idle(origin=origin, connection=connection, since=now))
        self._drop_useless()

    def _drop_useless(self) -> None:
        oldest = asyncio.get_running_loop().time() - KEEP_IDLE_S
        useful: list[_Idle] = []
        useless: list[_Idle] = []
        for idle in self._idle:
            is_useful = idle.connection.is_reusable and idle.since > oldest
            (useful if is_useful else useless).append(idle)
        self._idle = useful[-MAX_IDLE:]
        for idle in useless + useful[:-MAX_IDLE]:
            idle.connection.close()

    async def _connect(self, origin: Origin, timeout_s: float | None) -> Connection:
        loop = asyncio.get_running_loop()
        tls = self._tls_context() if origin.scheme == "https" else None
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    Connection, origin.host, origin.port, ssl=tls
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("no connection within the limit") from error
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        return self._tls


class _Body(httpx.AsyncByteStream):
    def __init__(
        self, connection: Connection, *, silence_s: float | None, release: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self._release: Callable[[], None] | None = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._connection.next_piece(silence_s=self._silence_s)) is not None:
            yield piece

    async def aclose(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


def _origin_of(url: httpx.URL) -> Origin:
    port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    if port is None or not url.host:
        raise httpx.UnsupportedProtocol(f"{url} isn't an http:// or https:// address")
    return Origin(url.scheme, url.host, port)


def _as_bytes(request: httpx.Request, body: bytes) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % header for header in request.headers.raw]
    if any(b"\r" in line or b"\n" in line for line in lines):
        raise httpx.LocalProtocolError("a header has several lines")
    return b"\r\n".join([*lines, b"", body])
