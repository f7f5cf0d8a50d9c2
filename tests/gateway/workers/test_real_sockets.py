"""What the client makes of workers that misbehave, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.workers.client import WorkerClient, WorkerSilent, WorkerUnreachable

pytestmark = pytest.mark.anyio

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Worker:
    """Answers requests on raw sockets as the test says; `client` calls it."""

    def __init__(self, answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._answer = answer
        self.client: WorkerClient
        self.address = ""
        self.num_connections = 0
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                await self._answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.ended.set()

    async def open(self):
        return await self.client.open(self.address, "/x", b"{}")


@asynccontextmanager
async def answering(answer, *, silence_s: float = 5) -> AsyncIterator[Worker]:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    worker = Worker(write if isinstance(answer, bytes) else answer)
    listening = await asyncio.start_server(worker.serve, "127.0.0.1", 0, backlog=1024)
    worker.address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with WorkerClient(cluster_token=None, silence_s=silence_s) as worker.client:
        yield worker
    listening.close()


async def test_whole_answers_share_a_connection():
    async with answering(HELLO) as worker:
        answers = [await (await worker.open()).read() for _ in range(3)]
    assert [answer.body for answer in answers] == [b"hello"] * 3
    assert worker.num_connections == 1


async def test_pieces_come_as_they_are_sent():
    seen = asyncio.Event()

    async def answer(writer):
        writer.write(CHUNKED + b"5\r\nfirst\r\n")
        await seen.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")

    async with answering(answer) as worker:
        stream = await worker.open()
        assert await stream.next_piece() == b"first"
        seen.set()
        assert [await stream.next_piece(), await stream.next_piece()] == [b"last", None]


async def test_streams_are_as_many_as_requests():
    num_streams = 150
    all_there = asyncio.Barrier(num_streams)

    async def answer(writer):
        await all_there.wait()
        writer.write(HELLO)

    async def ask(worker):
        return (await (await worker.open()).read()).body

    async with answering(answer) as worker:
        bodies = await asyncio.gather(*(ask(worker) for _ in range(num_streams)))
    assert bodies == [b"hello"] * num_streams


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        CHUNKED + b"5\r\nhel",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        b"220 ready\r\n\r\n",
        CHUNKED + b"zz\r\n",
    ],
)
async def test_an_answer_that_is_not_whole_is_a_lost_worker(answer):
    async def send(writer):
        writer.write(answer)
        writer.close()

    async with answering(send) as worker:
        with pytest.raises(WorkerUnreachable):
            await (await worker.open()).read()


async def test_silence_in_the_middle_is_told_from_a_lost_worker():
    async with answering(CHUNKED + b"5\r\nhello\r\n", silence_s=0.1) as worker:
        stream = await worker.open()
        assert await stream.next_piece() == b"hello"
        with pytest.raises(WorkerSilent):
            await stream.next_piece()
        await stream.aclose()
        await worker.ended.wait()


async def test_leaving_a_stream_closes_its_connection():
    async with answering(CHUNKED + b"5\r\nhello\r\n") as worker:
        stream = await worker.open()
        assert await stream.next_piece() == b"hello"
        await stream.aclose()
        async with asyncio.timeout(5):
            await worker.ended.wait()
