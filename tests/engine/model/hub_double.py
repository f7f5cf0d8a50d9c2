"""A loopback server that speaks the paths of huggingface.co which a download needs.

Serves real files of a local checkpoint; remembers what it was asked, so that a test can say what
was *not* fetched.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True, kw_only=True)
class Hub:
    """One running double. `asked` holds "GET /path" lines in order."""

    endpoint: str
    repositories: dict[str, Path]
    asked: list[str] = field(default_factory=list)

    def downloaded(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {
            line.rsplit("/", 1)[1]
            for line in self.asked
            if line.startswith("GET ") and "/resolve/" in line
        }


@contextmanager
def hub_double(repositories: dict[str, Path]) -> Iterator[Hub]:
    """Serve `repositories` ("owner/name" -> directory) on a free loopback port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(  # type: ignore[attr-defined]
        endpoint=f"http://127.0.0.1:{server.server_port}", repositories=repositories
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        for name, directory in self.hub.repositories.items():
            if path.startswith(f"/api/models/{name}/revision/"):
                return self._send(_json(_model_info(name, directory)), {}, with_body)
            if path.startswith(f"/api/models/{name}/tree/"):
                return self._send(_json(_tree(directory)), {}, with_body)
            if path.startswith(f"/{name}/resolve/"):
                file = directory / path.removeprefix(f"/{name}/resolve/").split("/", 1)[1]
                if file.is_file():
                    return self._send_file(file, with_body)
                return self._refuse("EntryNotFound", "Entry not found")
        return self._refuse("RepoNotFound", "Repository not found")

    def _send_file(self, file: Path, with_body: bool) -> None:
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        self._send(content, headers, with_body)

    def _send(self, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _refuse(self, code: str, message: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _model_info(name: str, directory: Path) -> dict[str, object]:
    siblings = [{"rfilename": file.name} for file in sorted(directory.iterdir())]
    return {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}


def _tree(directory: Path) -> list[dict[str, object]]:
    return [
        {
            "type": "file",
            "oid": hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest(),
            "size": file.stat().st_size,
            "path": file.name,
        }
        for file in sorted(directory.iterdir())
    ]


def _json(content: object) -> bytes:
    return json.dumps(content).encode()
