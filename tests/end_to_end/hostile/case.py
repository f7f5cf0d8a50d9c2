"""A hostile upload: its name, how it is sent, and what the refusal must say."""

import io
import json
import socket
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BOUNDARY = "frontier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer's status and body; status 0: the connection ended without one."""

    status: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where the uploads go, and what there is around it.

    config, weights   of a sound adapter, which the hostile ones are made of
    root, outside     folders that the gateway may, and may not, read
    """

    url: str
    config: bytes
    weights: bytes
    root: Path
    outside: Path

    @property
    def files(self) -> dict[str, bytes]:
        return {CONFIG: self.config, WEIGHTS: self.weights}

    def post(self, path: str = "/v1/adapters", **options: object) -> Reply:
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as http:
            answer = http.post(path, **options)
        return Reply(status=answer.status_code, text=answer.text)

    def post_files(self, files: Mapping[str, bytes], **fields: str) -> Reply:
        parts = [("files", (name, data)) for name, data in files.items()]
        return self.post(data={"name": "hostile"} | fields, files=parts)

    def post_json(self, body: object, path: str = "/v1/adapters") -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.post(path, content=raw, headers={"content-type": "application/json"})

    def post_form(self, body: bytes, *, content_type: str | None = None) -> Reply:
        wanted = content_type or f"multipart/form-data; boundary={BOUNDARY}"
        return self.post(content=body, headers={"content-type": wanted})

    def send_raw(self, request: bytes, *, hangs_up: bool) -> Reply:
        """Send bytes as they are, and read what comes back until the gateway closes."""
        address = urlsplit(self.url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(request)
            if hangs_up:
                connection.shutdown(socket.SHUT_WR)
            raw = b"".join(iter(lambda: connection.recv(65536), b""))
        status = int(raw.split(b" ", 2)[1]) if raw else 0
        return Reply(status=status, text=raw.decode(errors="replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hostile upload; `words` stand in the answer, whatever their case."""

    name: str
    send: Callable[[Ground], Reply]
    words: str
    status: int = 422

    @property
    def id(self) -> str:
        return self.name.replace(" ", "-")


def files_case(name: str, words: str, change: Callable[[dict[str, bytes]], object]) -> Case:
    """Upload a sound adapter's files after `change` was made to them."""

    def send(ground: Ground) -> Reply:
        files = ground.files
        change(files)
        return ground.post_files(files)

    return Case(name=name, send=send, words=words)


def archive_case(
    name: str,
    words: str,
    build: Callable[[dict[str, bytes]], bytes],
    *,
    status: int = 422,
    filename: str = "adapter.tar.gz",
) -> Case:
    """Upload one archive that `build` makes of a sound adapter's files."""

    def send(ground: Ground) -> Reply:
        return ground.post_files({filename: build(ground.files)})

    return Case(name=name, send=send, words=words, status=status)


def zip_of(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def part(name: str, data: bytes, *, filename: str | None = None, more: bytes = b"") -> bytes:
    """Write one part of a form by hand."""
    shown = "" if filename is None else f'; filename="{filename}"'
    head = f'content-disposition: form-data; name="{name}"{shown}\r\n'.encode()
    return f"--{BOUNDARY}\r\n".encode() + head + more + b"\r\n" + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
