"""Requests to workers over real sockets: what a server may do, and what becomes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from gateway.workers.connection import MAX_UNREAD_BYTES
from gateway.workers.transport import WorkerTransport

pytestmark = pytest.mark.anyio

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Server:
    """Answers requests on raw sockets as the test says; `http` is its client."""

    def __init__(self, answer: Callable) -> None:
        self._answer = answer
        self.http: httpx.AsyncClient
        self.num_connections = 0
        self.requests: list[bytes] = []
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                await self._answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.ended.set()


@asynccontextmanager
async def answering(answer) -> AsyncIterator[Server]:
    """A server with a client of the transport; `answer` is bytes or a coroutine function."""

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    server = Server(write if isinstance(answer, bytes) else answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with httpx.AsyncClient(
        transport=WorkerTransport(), base_url=f"http://127.0.0.1:{port}", timeout=5
    ) as server.http:
        yield server
    listening.close()


async def a_few_turns(num_turns: int = 5) -> None:
    """Let the event loop see what is in its sockets."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def closing(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    for piece in pieces:
        writer.write(piece)
    writer.close()


async def test_whole_answers_share_a_connection():
    async with answering(HELLO) as server:
        answers = [await server.http.post("/x", content=b"body"), await server.http.get("/x?y=1")]

    assert [answer.text for answer in answers] == ["hello", "hello"]
    assert server.num_connections == 1
    assert server.requests[0].startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert server.requests[0].endswith(b"\r\n\r\nbody")
    assert server.requests[1].startswith(b"GET /x?y=1 HTTP/1.1\r\n")


async def test_requests_at_the_same_time_have_connections_of_their_own():
    both = asyncio.Barrier(2)

    async def answer(writer):
        await both.wait()
        writer.write(HELLO)

    async with answering(answer) as server:
        await asyncio.gather(server.http.get("/"), server.http.get("/"))

    assert server.num_connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        CHUNKED + b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO,
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
async def test_body_is_what_was_sent_however_it_was_sent(answer):
    async with answering(answer) as server:
        assert (await server.http.get("/")).content == b"hello"


async def test_body_without_a_length_ends_with_its_connection():
    async def answer(writer):
        await closing(writer, b"HTTP/1.1 200 OK\r\n\r\n", b"hello")

    async with answering(answer) as server:
        assert [(await server.http.get("/")).content for _ in range(2)] == [b"hello", b"hello"]

    assert server.num_connections == 2


async def test_head_has_the_length_of_a_body_but_none():
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n") as server:
        answers = [await server.http.head("/") for _ in range(2)]

    assert [(answer.headers["content-length"], answer.content) for answer in answers] == [
        ("5", b""),
        ("5", b""),
    ]


async def test_pieces_come_as_they_are_sent():
    seen = asyncio.Event()

    async def answer(writer):
        writer.write(CHUNKED + b"5\r\nfirst\r\n")
        await seen.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")

    async with answering(answer) as server, server.http.stream("GET", "/") as stream:
        pieces = stream.aiter_bytes()
        assert await anext(pieces) == b"first"
        seen.set()
        assert await anext(pieces) == b"last"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", httpx.ReadError),
        (CHUNKED + b"5\r\nhel", httpx.ReadError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello", httpx.ReadError),
        (b"220 ready\r\n\r\n", httpx.RemoteProtocolError),
        (CHUNKED + b"zz\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 101 Go on\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", httpx.ProtocolError),
    ],
)
async def test_answer_that_is_no_whole_one_is_an_error(answer, kind):
    async def send(writer):
        await closing(writer, answer)

    async with answering(send) as server:
        with pytest.raises(kind):
            await server.http.get("/")


async def test_answer_that_nobody_asked_for_ends_the_connection():
    async with answering(HELLO + HELLO) as server:
        assert [(await server.http.get("/")).text for _ in range(2)] == ["hello", "hello"]

    assert server.num_connections == 2


async def test_silence_in_the_middle_is_a_timeout():
    async with (
        answering(CHUNKED + b"5\r\nhello\r\n") as server,
        server.http.stream("GET", "/", timeout=0.05) as stream,
    ):
        pieces = stream.aiter_bytes()
        assert await anext(pieces) == b"hello"
        with pytest.raises(httpx.ReadTimeout):
            await anext(pieces)


async def test_leaving_a_stream_closes_its_connection():
    async with answering(CHUNKED + b"5\r\nhello\r\n") as server:
        async with server.http.stream("GET", "/"):
            pass
        await server.ended.wait()


async def test_answer_that_was_not_read_is_not_the_next_one():
    async with answering(HELLO) as server:
        async with server.http.stream("GET", "/"):
            await a_few_turns()

        assert (await server.http.get("/")).text == "hello"
        assert server.num_connections == 2


async def test_idle_connection_that_the_server_closed_is_not_used_again():
    async def answer(writer):
        await closing(writer, HELLO)

    async with answering(answer) as server:
        for _ in range(3):
            server.ended.clear()
            assert (await server.http.get("/")).text == "hello"
            await server.ended.wait()
            await a_few_turns()

    assert server.num_connections == 3


async def test_server_waits_for_a_reader_that_is_slow():
    size = 64 * MAX_UNREAD_BYTES
    num_written = 0

    async def answer(writer):
        nonlocal num_written
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(b"x" * MAX_UNREAD_BYTES)
            await writer.drain()
            num_written += 1

    async with answering(answer) as server, server.http.stream("GET", "/") as stream:
        await a_few_turns(200)
        assert num_written < 60
        assert sum([len(piece) async for piece in stream.aiter_bytes()]) == size


@pytest.mark.parametrize("value", ["a\r\nx-evil: 1", "a\nb"])
async def test_header_of_several_lines_is_not_sent(value):
    async with answering(HELLO) as server:
        with pytest.raises(httpx.LocalProtocolError):
            await server.http.get("/", headers={"x-name": value})
    assert server.num_connections == 0
