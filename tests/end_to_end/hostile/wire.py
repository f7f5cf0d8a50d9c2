"""Forms, requests and paths that try the gateway itself."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.hostile.case import BOUNDARY, CONFIG, END, WEIGHTS, Case, Ground, Reply, part

Send = Callable[[Ground], Reply]


def form(name: str, words: str, build: Callable[[Ground], bytes], status: int = 400) -> Case:
    """Send a form that was written by hand."""
    return Case(
        name=f"form {name}", send=lambda g: g.post_form(build(g)), words=words, status=status
    )


def field(title: str, words: str, status: int = 400, **fields: str) -> Case:
    return Case(
        name=f"form {title}",
        send=lambda ground: ground.post_files(ground.files, **fields),
        words=words,
        status=status,
    )


def filename(name: str, words: str, sent: str) -> Case:
    return form(
        name, words, lambda g: NAME + part("files", g.config, filename=sent) + sound(g) + END
    )


def sound(ground: Ground) -> bytes:
    return b"".join(part("files", data, filename=name) for name, data in ground.files.items())


def json_case(name: str, words: str, body: object, status: int = 400) -> Case:
    return Case(name=f"json {name}", send=lambda g: g.post_json(body), words=words, status=status)


def raw(name: str, words: str, status: int, head: bytes, body: bytes = b"") -> Case:
    start = b"POST /v1/adapters HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return Case(
        name=f"http {name}",
        send=lambda g: g.send_raw(start + head + b"\r\n" + body, hangs_up=status == 0),
        words=words,
        status=status,
    )


def at_path(name: str, words: str, make: Callable[[Ground], Path | str], status: int = 400) -> Case:
    """Ask for a path; `make` prepares what lies there."""
    return Case(
        name=f"path {name}",
        send=lambda g: g.post_json({"name": "hostile", "path": str(make(g))}),
        words=words,
        status=status,
    )


def vllm(name: str, words: str, **fields: object) -> Case:
    return Case(
        name=f"vllm call {name}",
        send=lambda ground: ground.post_json(
            {"lora_name": "hostile", "lora_path": str(ground.outside), **fields},
            path="/v1/load_lora_adapter",
        ),
        words=words,
        status=400,
    )


def too_many_chunks(ground: Ground) -> Reply:
    """33 MiB of JSON whose length was never announced."""
    return ground.post(
        content=(b" " * (1 << 20) for _ in range(33)), headers={"content-type": "application/json"}
    )


def linked(ground: Ground, name: str, target: Path | str) -> Path:
    link = ground.root / name
    link.symlink_to(target)
    return link


def folder(ground: Ground, name: str) -> Path:
    made = ground.root / name
    made.mkdir()
    (made / CONFIG).write_bytes(ground.config)
    return made


def linked_weights(ground: Ground) -> Path:
    made = folder(ground, "linked-weights")
    (made / WEIGHTS).symlink_to(ground.outside / WEIGHTS)
    return made


def piped_weights(ground: Ground) -> Path:
    made = folder(ground, "piped-weights")
    os.mkfifo(made / WEIGHTS)
    return made


def pipe(ground: Ground) -> Path:
    os.mkfifo(ground.root / "pipe.tar.gz")
    return ground.root / "pipe.tar.gz"


def listening(ground: Ground) -> Path:
    path = ground.root / "socket.zip"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


def text_file(ground: Ground) -> Path:
    path = ground.root / "notes.zip"
    path.write_text("no archive at all")
    return path


def two_adapters(ground: Ground) -> Path:
    made = ground.root / "two"
    for name in ("one", "other"):
        (made / name).mkdir(parents=True)
        for file, data in ground.files.items():
            (made / name / file).write_bytes(data)
    return made


NAME = part("name", b"hostile")
FORMS = [
    Case(
        name="form without a boundary",
        send=lambda ground: ground.post_form(NAME + END, content_type="multipart/form-data"),
        words="boundary",
        status=400,
    ),
    Case(
        name="form with another boundary",
        send=lambda g: g.post_form(
            NAME + sound(g) + END, content_type="multipart/form-data; boundary=other"
        ),
        words="form can't be read",
        status=400,
    ),
    form("cut in a file", "ends before its last boundary", lambda g: (NAME + sound(g))[:-3000]),
    form("without its last boundary", "ends before", lambda g: NAME + sound(g)),
    form("of no parts", "`name` is missing", lambda _: END),
    form("of garbage", "can't be read", lambda _: b"\x00\xff" * 500),
    form("without a name", "`name` is missing", lambda g: sound(g) + END),
    form("with two names", "one piece of text", lambda g: NAME + NAME + sound(g) + END),
    form("whose name is a file", "not a file", lambda g: part("name", b"x", filename="n") + END),
    form("whose files are text", "not text", lambda g: NAME + part("files", g.config) + END),
    form("without files", "file parts", lambda _: NAME + END),
    form("with a part of no name", "has no name", lambda _: (
        f"--{BOUNDARY}\r\ncontent-type: text/plain\r\n\r\nx\r\n".encode() + END)),
    form("with a header of ten kilobytes", "can't be read", lambda g: (
        NAME + part("files", b"x", filename="x", more=b"x-e: " + b"e" * 9_999 + b"\r\n") + END)),
    form("with twenty header lines", "at most 8 header", lambda g: (
        NAME + part("files", b"x", filename="x", more=b"x-evil: e\r\n" * 20) + END)),
    form("with a text of a megabyte", "takes 4096", lambda _: (
        part("base", b"b" * (1 << 20)) + END), 413),
    form("with a name that isn't UTF-8", "isn't utf-8", lambda _: part("name", b"\xff\xfe") + END),
    form("of three hundred files", "it takes 256", lambda _: (
        NAME + b"".join(part("files", b"", filename=f"f{n}") for n in range(300)) + END), 413),
    form("of twenty texts", "it takes 16", lambda _: NAME * 20 + END, 413),
    form("with an empty file name", "file's name", lambda g: (
        NAME + part("files", g.config, filename="") + END)),
    form("with a file twice", "two parts are named", lambda g: NAME + sound(g) * 2 + END),
    filename("file name that climbs", "can't be a file's name", "../../evil-climber"),
    filename("file name that climbs by backslashes", "can't be", "..\\\\..\\\\evil"),
    filename("file name that is absolute", "can't be a file's name", "/tmp/evil-absolute"),
    filename("file name with a zero byte", "", "adapter_config.json\0.txt"),
    filename("file name of three thousand letters", "at most 1024", "n" * 3000),
    form("with a file name in another case", "isn't quite", lambda g: (
        NAME + part("files", g.config, filename="Adapter_Config.JSON") + END), 422),
    field("whose name is a path", "can't be an adapter's name", name="../../etc/passwd"),
    field("whose name is a file url", "can't be an adapter's name", name="file:///etc/passwd"),
    field("whose name is too long", "can't be an adapter's name", name="n" * 129),
    field("whose name has a newline", "can't be an adapter's name", name="a\nb"),
    field("whose name is empty", "one piece of text", name=""),
    field("for a base that isn't", "there is no base", 404, base="gpt-7"),
    field("for a base that is a path", "there is no base", 404, base="../../../etc"),
    field("that promotes perhaps", "`true` or `false`", promote="maybe"),
    field("with a field of its own", "`lora_path` isn't supported", lora_path="/etc"),
]  # fmt: skip
REQUESTS = [
    json_case("that is garbage", "isn't json", b"\x80garbage"),
    json_case("that nests deeply", "", b'{"name": ' + b"[" * 50_000),
    json_case("without a path", "`path` is missing", {"name": "x"}),
    json_case("with a field of its own", "isn't supported", {"name": "x", "path": "/", "run": 1}),
    json_case("whose name is a list", "`name`", {"name": ["x"], "path": "/"}),
    json_case("whose name climbs", "can't be an adapter's name", {"name": "../x", "path": "/"}),
    json_case("that is compressed", "isn't json", b"\x1f\x8b\x08\x00evil"),
    Case(name="http chunks over the limit", send=too_many_chunks, words="at most 33554432",
         status=413),
    raw("that announces three gigabytes", "at most 2147483648", 413,
        b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 3221225472\r\n"),
    raw("that announces less than it sends", "isn't json", 400,
        b"content-type: application/json\r\ncontent-length: 3\r\n", b'{"name": "hostile"}'),
    raw("that announces more than it sends", "", 0,
        b"content-type: application/json\r\ncontent-length: 5000\r\n", b'{"name": "x"}'),
    raw("with a negative length", "", 400, b"content-length: -5\r\n", b"x"),
    raw("with two lengths", "", 400, b"content-length: 3\r\ncontent-length: 9\r\n", b"xxx"),
    raw("with a broken chunk", "", 400, b"transfer-encoding: chunked\r\n", b"zz\r\nevil\r\n"),
    raw("with an endless header", "", 400, b"x-evil: " + b"e" * 66_000 + b"\r\n"),
]  # fmt: skip
PATHS = [
    at_path("outside the roots", "must be absolute, and name", lambda g: g.outside),
    at_path("that climbs out", "must be absolute", lambda g: g.root / ".." / g.outside.name),
    at_path("that is relative", "must be absolute", lambda g: os.path.relpath(g.outside)),
    at_path("with a zero byte", "must be absolute", lambda g: f"{g.root}/a\0b"),
    at_path("of ten thousand letters", "must be absolute", lambda g: g.root / ("n" * 10_000)),
    at_path("by way of the process", "must be", lambda g: f"/proc/self/root{g.outside}"),
    at_path("of a device", "must be absolute", lambda _: "/dev/zero"),
    at_path("that is a url", "must be absolute", lambda g: f"file://{g.root}"),
    at_path("that isn't there", "must be absolute", lambda g: g.root / "nowhere"),
    at_path("linked to the outside", "must be absolute", lambda g: linked(g, "out", g.outside)),
    at_path("linked to a device", "must be", lambda g: linked(g, "zero.tar", "/dev/zero")),
    at_path("linked to itself", "must be absolute", lambda g: linked(g, "loop", "loop")),
    at_path("below a linked folder", "must be", lambda g: linked(g, "up", "..") / g.outside.name),
    at_path("whose weights are a link", "is a link", linked_weights, 422),
    at_path("whose weights are a pipe", "regular file", piped_weights, 422),
    at_path("that is a pipe", "regular file", pipe, 422),
    at_path("that is a socket", "the archive", listening, 422),
    at_path("that is a text", "no archive", text_file, 422),
    at_path("of two adapters", "2 adapters", two_adapters, 422),
    vllm("from the outside", "lora_path must be absolute"),
    vllm("with a name that climbs", "can't be an adapter's name", lora_name="../../x"),
    vllm("with a field of its own", "isn't supported", code="import os"),
]
CASES = [*FORMS, *REQUESTS, *PATHS]
