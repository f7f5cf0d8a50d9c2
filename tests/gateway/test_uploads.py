"""How an upload comes in: forms cut anywhere, forms that stop, and what is left behind."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gateway.errors import GatewayError
from gateway.multipart import ReceivedForm, receive_form
from tests.gateway.world import WEIGHTS, gateway_world

pytestmark = pytest.mark.anyio
BOUNDARY = "frontier"
HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    shown = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'
    return head.encode() + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


async def received(pieces: list[bytes], folder) -> ReceivedForm:
    """Give the pieces to the receiver one by one, as they would come over the wire."""
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        return messages.pop(0)

    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    return await receive_form(Request({"type": "http", "headers": headers}, receive), folder)


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(at, len(body)) for at in cuts} | {len(body)})
    return [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    data=st.lists(st.binary(max_size=60) | st.just(f"\r\n--{BOUNDARY}"[:-1].encode()), max_size=4),
    cuts=st.lists(st.integers(0, 700), max_size=12),
)
def test_form_is_the_same_wherever_it_is_cut(data, cuts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("form")
    parts = [part("files", content, f"파일 {n}") for n, content in enumerate(data)]
    body = part("name", b"pirate") + b"".join(parts) + part("base", b"tiny") + END

    form = asyncio.run(received(cut(body, cuts), folder))

    assert form.texts == [("name", "pirate"), ("base", "tiny")]
    assert [file.filename for file in form.files] == [f"파일 {n}" for n in range(len(data))]
    assert [file.path.read_bytes() for file in form.files] == data


@given(data=st.data())
def test_damaged_form_is_refused_in_words_or_harmless(data, tmp_path_factory):
    body = bytearray(part("name", b"x") + part("files", b"y" * 20, "f") + END)
    for _ in range(data.draw(st.integers(0, 5))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    whole = bytes(body[: data.draw(st.integers(0, len(body)))])
    folder = tmp_path_factory.mktemp("form")

    errors = []
    try:
        asyncio.run(received([whole], folder))
    except GatewayError as error:
        errors.append(error)
    assert all(400 <= error.status < 500 and str(error).isprintable() for error in errors)
    assert {path.name for path in folder.iterdir()} <= {"0"}


async def test_file_is_never_called_what_the_client_calls_it(tmp_path):
    form = await received([part("files", b"x", "../../evil") + END], tmp_path)

    assert form.files[0].path == tmp_path / "0"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"upload_silence_s": 0.01}, "nothing of the upload came for 0.01 seconds"),
        ({"upload_timeout_s": 0.2}, "at most 0.2 are waited"),
    ],
)
async def test_upload_that_comes_too_slowly_is_given_up_and_leaves_nothing(
    valkey_url, redis_client, tmp_path, settings, words
):
    async with gateway_world(valkey_url, tmp_path, **settings) as world:
        reader, writer = await begin_upload(world)
        dropping = asyncio.create_task(drop(writer))
        async with asyncio.timeout(20):
            answer = await read_until_cut(reader)
        dropping.cancel()
        writer.close()
        left = list((tmp_path / "staging").iterdir())

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert words in answer.decode()
    assert left == []


async def begin_upload(world):
    """Announce a long form and send its first file's beginning."""
    address = world.http.base_url
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(
        b"POST /v1/adapters HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\ncontent-type: "
        + HEADERS["content-type"].encode()
        + b"\r\n\r\n"
        + part("name", b"pirate")
        + part("files", b"x" * 2000, WEIGHTS[0])
    )
    await writer.drain()
    return reader, writer


async def read_until_cut(reader) -> bytes:
    """Return what the server said; it may reset the connection of a client that still sends."""
    answer = bytearray()
    with suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            answer += piece
    return bytes(answer)


async def drop(writer) -> None:
    """Send one byte now and then."""
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.05)


async def test_client_that_leaves_in_the_middle_leaves_nothing(world):
    await world.http.get("/health")
    staging = world.store_dir / "staging"
    _, writer = await begin_upload(world)
    await until(lambda: list(staging.iterdir()))

    writer.close()

    await until(lambda: not list(staging.iterdir()))


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not is_so():  # noqa: ASYNC110 - a folder tells nobody that it has changed
            await asyncio.sleep(0)


async def test_fields_may_follow_the_files(world, peft_adapters):
    files = b"".join(
        part("files", (peft_adapters["pirate"] / name).read_bytes(), name) for name in WEIGHTS
    )
    body = files + part("promote", b"true") + part("name", b"pirate") + END

    answer = await world.http.post("/v1/adapters", content=body, headers=HEADERS)

    assert answer.status_code == 201, answer.text


async def test_folder_may_be_sent_file_by_file(world, peft_adapters):
    """With the names that a browser gives to the files of a chosen folder."""
    folder = peft_adapters["pirate"]
    files = [("files", (f"my adapter/{name}", (folder / name).read_bytes())) for name in WEIGHTS]
    files += [("files", ("my adapter/optimizer.pt", b"pickle")), ("files", ("한글.txt", b"x"))]

    answer = await world.http.post("/v1/adapters", data={"name": "pirate"}, files=files)

    assert answer.status_code == 201, answer.text
    assert answer.json()["skipped"] == ["my adapter/optimizer.pt", "한글.txt"]


async def test_file_below_a_file_is_just_a_name(world, peft_adapters):
    files = [("files", (name, (peft_adapters["pirate"] / name).read_bytes())) for name in WEIGHTS]
    files += [("files", (f"{WEIGHTS[0]}/deep/er", b"x"))]

    answer = await world.http.post("/v1/adapters", data={"name": "pirate"}, files=files)

    assert answer.status_code == 201, answer.text
