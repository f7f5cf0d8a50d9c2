"""HTTP to workers. The one place that knows httpx; its errors end here.

WorkerCallFailed
├── WorkerUnreachable   no connection, or it broke before the answer was whole
└── WorkerSilent        connected, but no byte within the limit
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
from aiohttp import ClientError, ClientSession, DummyCookieJar, TCPConnector
from httpx_aiohttp import AiohttpTransport

JSON_HEADERS = {"content-type": "application/json"}
KEEP_IDLE_S = 4.0
# The last: what a worker may say that httpx's transport has no error for.
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ClientError)


class WorkerCallFailed(Exception):
    """A call to a worker ended without a whole answer."""


class WorkerUnreachable(WorkerCallFailed):
    """The connection can't be made, or is gone."""


class WorkerSilent(WorkerCallFailed):
    """The worker is connected but sent nothing for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAnswer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body, or None if it isn't JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


class WorkerStream:
    """An answer whose body is still coming; closing it tells the worker to stop.

    Made by WorkerClient.open only. `aclose` may be called at any time, more than once.
    """

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        # httpx's own two iterators around it are for compressed bodies.
        is_plain = "content-encoding" not in response.headers
        assert isinstance(response.stream, httpx.AsyncByteStream), "its client is async"
        self._pieces = aiter(response.stream) if is_plain else response.aiter_bytes()

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def next_piece(self) -> bytes | None:
        """Return the next bytes, or None after the last. Raises WorkerCallFailed if cut off."""
        try:
            return await anext(self._pieces, None)
        except _FAILURES as error:
            raise _as_failure(error) from error

    async def read(self) -> WorkerAnswer:
        """Return the rest of the body as a whole answer, and close."""
        try:
            body = bytearray()
            while (piece := await self.next_piece()) is not None:
                body += piece
            return WorkerAnswer(status=self.status, headers=self.headers, body=bytes(body))
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; the worker frees the request at its next step."""
        with _translated():
            await self._response.aclose()


class WorkerClient:
    """Calls workers by address, with the cluster token; one pool of connections for all of them.

    Used as an async context manager. Connecting may take 2 s; `silence_s` bounds the time
    between any two pieces of an answer.
    """

    def __init__(
        self,
        *,
        cluster_token: str | None,
        silence_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {cluster_token}"} if cluster_token else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            transport=_aiohttp() if transport is None else transport,
            timeout=httpx.Timeout(silence_s, connect=2.0),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def open(
        self,
        address: str,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
    ) -> WorkerStream:
        """Send `body` and return once the worker's status and headers are there."""
        with _translated():
            request = self._http.build_request(
                method, address + path, content=body, headers={**JSON_HEADERS, **(headers or {})}
            )
            return WorkerStream(await self._http.send(request, stream=True))

    async def post(
        self, address: str, path: str, document: Any, *, timeout_s: float
    ) -> WorkerAnswer:
        """POST `document` as JSON and return the whole answer."""
        with _translated():
            response = await self._http.post(
                address + path,
                content=msgspec.json.encode(document),
                headers=JSON_HEADERS,
                timeout=httpx.Timeout(timeout_s, connect=2.0),
            )
        return WorkerAnswer(
            status=response.status_code, headers=response.headers, body=response.content
        )

    async def get(self, address: str, path: str, *, timeout_s: float) -> WorkerAnswer:
        """GET the whole answer."""
        with _translated():
            response = await self._http.get(address + path, timeout=timeout_s)
        return WorkerAnswer(
            status=response.status_code, headers=response.headers, body=response.content
        )


def _aiohttp() -> httpx.AsyncBaseTransport:
    """aiohttp's connections below httpx: a piece of a stream costs half as much as on httpx's own.

    As many as there are requests; an idle one is left before the worker would close it.
    """
    return AiohttpTransport(
        client=lambda: ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S),
            cookie_jar=DummyCookieJar(),
        )
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        raise _as_failure(error) from error


def _as_failure(error: Exception) -> WorkerCallFailed:
    if isinstance(error, httpx.ConnectTimeout):
        return WorkerUnreachable("no connection within the limit, or it was closed at once")
    if isinstance(error, httpx.TimeoutException):
        return WorkerSilent("no byte within the limit")
    return WorkerUnreachable(f"{type(error).__name__}: {error}")
