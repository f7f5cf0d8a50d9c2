"""What our servers' HTTP parser takes, and what it refuses before an application sees it."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from adapters.http_protocol import MAX_HEAD_BYTES, BoundedHttp, send_of_pieces

pytestmark = pytest.mark.anyio

START = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
MUCH = b"e" * (2 * MAX_HEAD_BYTES)


async def length(scope, receive, send):
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{len(body)} bytes")(scope, receive, send)


@asynccontextmanager
async def connected(app=length):
    """A connection to an application, which says how long a body is."""
    config = uvicorn.Config(app, http=BoundedHttp, lifespan="off", log_config=None)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: BoundedHttp(config, ServerState(), {}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    async with asyncio.timeout(10):
        yield reader, writer
    writer.close()
    server.close()


async def reply(*pieces: bytes) -> bytes:
    """What comes back until the server closes; the pieces are sent one after another."""
    async with connected() as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            for _ in range(3):
                await asyncio.sleep(0)
        try:
            return await reader.read()
        except ConnectionError:
            return b"reset"


@pytest.mark.parametrize(
    "pieces",
    [
        (START + b"x-evil: ", MUCH),
        (START, *[b"x-%d: e\r\n" % n for n in range(MAX_HEAD_BYTES // 8)]),
        (b"GET /", MUCH),
        (MUCH,),
        (CHUNKED + b"3;x=", MUCH),
        (CHUNKED + b"3\r\nabc\r\n0\r\nx-evil: ", MUCH),
    ],
)
async def test_head_without_an_end_is_refused(pieces):
    answer = await reply(*pieces)

    assert answer.startswith(b"HTTP/1.1 400 ") or answer == b"reset"


async def test_refusal_says_the_limit():
    answer = await reply(START + b"x-evil: ", MUCH[: MAX_HEAD_BYTES + 1])

    assert answer.endswith(b"\r\n\r\nThe request's head has more than 32768 bytes.")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"hello\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        START + b"no colon\r\n\r\n",
        START + b"content-length: -5\r\n\r\n",
        START + b"content-length: 99999999999999999999999\r\n\r\n",
        START + b"content-length: 3\r\ncontent-length: 9\r\n\r\nxxx",
        START + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        CHUNKED + b"zz\r\nevil\r\n",
    ],
)
async def test_malformed_request_is_a_400_in_words(request_bytes):
    answer = await reply(request_bytes)

    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b"\r\n\r\nInvalid HTTP request received.")


async def test_long_body_in_chunks_is_no_head():
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    async with connected() as (reader, writer):
        writer.write(CHUNKED)
        for _ in range(64):
            writer.write(chunk)
            await writer.drain()
        writer.write(b"0\r\nx-trailer: 1\r\n\r\n")

        assert (await reader.readuntil(b"bytes")).endswith(b"262144 bytes")


async def test_requests_of_one_connection_are_counted_each_for_itself():
    head = START + b"x-long: " + b"h" * (MAX_HEAD_BYTES // 2) + b"\r\ncontent-length: 1\r\n\r\n"
    async with connected() as (reader, writer):
        for _ in range(4):
            writer.write(head + b"x")
            assert (await reader.readuntil(b"bytes")).endswith(b"1 bytes")


async def test_pieces_of_each_answer_go_past_the_layers_which_see_its_start():
    seen = []

    async def layered(scope, receive, send):
        async def watched(message):
            seen.append(message["type"])
            await send(message)

        await watched({"type": "http.response.start", "status": 200, "headers": []})
        send_piece = send_of_pieces(scope, watched)
        body = scope["path"].encode()
        await send_piece({"type": "http.response.body", "body": body, "more_body": True})
        await send_piece({"type": "http.response.body", "body": b"."})

    async with connected(layered) as (reader, writer):
        # The second comes while the first is being answered.
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in (1, 2)))
        for body in (b"2\r\n/1\r\n1\r\n.\r\n0\r\n\r\n", b"2\r\n/2\r\n1\r\n.\r\n0\r\n\r\n"):
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"\r\n\r\n" + body)

    assert seen == ["http.response.start"] * 2
