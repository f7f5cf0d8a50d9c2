"""One HTTP request whose answer is kept as it comes, and read only afterwards.

The client shares the cores with what it measures. So while a stream runs, it notes only which
bytes came when; an HTTP library would spend a tenth of a core and more on a thousand events a
second.
"""

import asyncio
import json
import time
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

READ_BYTES = 1 << 16
TIMEOUT_S = 600.0
END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. `ends` and `times_s` say of each read how far it reached, and when."""

    status: int
    body: bytes
    ends: tuple[int, ...]  # in bytes of the body as it was sent
    times_s: tuple[float, ...]

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """Each JSON event of a stream, with the time at which the last of its bytes came."""
        found, start = [], 0
        for line in self.body.splitlines(keepends=True):
            start += len(line)
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                event = json.loads(line.removeprefix(b"data: "))
                found.append((self.times_s[bisect_left(self.ends, start)], event))
        return found


async def post(url: str, path: str, body: dict[str, Any]) -> Answer:
    """Send `body` as JSON over a connection of its own; return when the answer has ended."""
    address = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    reads: list[bytes] = []
    times_s: list[float] = []
    try:
        writer.write(head.encode() + content)
        async with asyncio.timeout(TIMEOUT_S):
            while data := await reader.read(READ_BYTES):
                times_s.append(time.perf_counter())
                reads.append(data)
    finally:
        writer.close()
    return read_answer(reads, times_s)


def read_answer(reads: list[bytes], times_s: list[float]) -> Answer:
    """Take an answer apart that came in these reads at these times."""
    head, found, rest = b"".join(reads).partition(END_OF_HEAD)
    if not found:
        raise RuntimeError("the server closed the connection before it answered")
    status_line, *fields = head.decode("latin-1").split("\r\n")
    is_chunked = any(
        field.lower().startswith("transfer-encoding:") and "chunked" in field.lower()
        for field in fields
    )
    ends = [end - len(head) - len(found) for end in accumulate(len(data) for data in reads)]
    body, ends = _without_chunks(rest, ends) if is_chunked else (rest, ends)
    return Answer(
        status=int(status_line.split(" ")[1]),
        body=body,
        ends=tuple(ends),
        times_s=tuple(times_s),
    )


def _without_chunks(sent: bytes, ends: list[int]) -> tuple[bytes, list[int]]:
    """The content of a chunked body; ends of reads are moved to where they fall in it."""
    parts: list[bytes] = []
    sent_ends, kept_ends = [0], [0]  # after each chunk, in what was sent and in the content
    place = 0
    while True:
        line_end = sent.index(b"\r\n", place)
        size = int(sent[place:line_end].split(b";")[0], 16)
        if size == 0:
            break
        parts.append(sent[line_end + 2 : line_end + 2 + size])
        place = line_end + 2 + size + 2
        sent_ends.append(place - 2)
        kept_ends.append(kept_ends[-1] + size)
    moved = []
    for end in ends:
        chunk = bisect_left(sent_ends, end)
        if chunk == len(sent_ends):
            moved.append(kept_ends[-1])
        else:
            missing = min(sent_ends[chunk] - end, kept_ends[chunk] - kept_ends[chunk - 1])
            moved.append(kept_ends[chunk] - missing if chunk else 0)
    return b"".join(parts), moved
