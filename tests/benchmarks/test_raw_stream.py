"""An answer reads the same however it was cut on its way, and each event has its own time."""

import asyncio

import pytest
from raw_stream import post, read_answer

EVENTS = [b'data: {"number": 1}\n\n', b': ping\n\ndata: {"number": 2}\n\n', b"data: [DONE]\n\n"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked() -> bytes:
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in EVENTS]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"


def plain() -> bytes:
    return HEAD + b"\r\n" + b"".join(EVENTS)


@pytest.mark.parametrize("sent", [chunked(), plain()], ids=["chunked", "plain"])
def test_an_answer_reads_the_same_wherever_it_was_cut(sent: bytes) -> None:
    for cut in range(len(sent) + 1):
        answer = read_answer([sent[:cut], sent[cut:]], [1.0, 2.0])

        assert answer.status == 200
        assert answer.body == b"".join(EVENTS)
        assert [event["number"] for _, event in answer.events()] == [1, 2]


@pytest.mark.parametrize("sent", [chunked(), plain()], ids=["chunked", "plain"])
def test_an_event_has_the_time_of_the_read_that_completed_its_line(sent: bytes) -> None:
    line_end = sent.index(b'"number": 2}\n') + len(b'"number": 2}\n')
    before, after = line_end - 1, line_end

    for cut, time_s in ((before, 2.0), (after, 1.0)):
        (first_s, _), (second_s, _) = read_answer([sent[:cut], sent[cut:]], [1.0, 2.0]).events()
        assert first_s == 1.0
        assert second_s == time_s


def test_a_connection_that_closes_without_an_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before it answered"):
        read_answer([b"HTTP/1.1 200"], [1.0])


def test_a_body_is_posted_as_json_and_the_answer_comes_back() -> None:
    seen = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"}"))
        writer.write(chunked())
        writer.close()

    async def exchange() -> int:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return (await post(f"http://127.0.0.1:{port}", "/there", {"a": 1})).status

    assert asyncio.run(exchange()) == 200
    assert seen[0].startswith(b"POST /there HTTP/1.1\r\n")
    assert seen[0].endswith(b'{"a": 1}')
