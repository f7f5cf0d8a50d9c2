"""A small HTTP server that gives prepared answers and keeps what it was asked."""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


@dataclass
class ScriptedServer:
    """`answers` by "METHOD /path" (no query): status, body and extra headers."""

    url: str = ""
    answers: dict = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def answer(self, route: str, body, *, status: int = 200, **headers) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers[route] = (status, data, headers)

    def answer_events(self, route: str, events, *, done: bool = True, **headers) -> None:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        lines.insert(1, ": ping\n\n")
        if done:
            lines.append("data: [DONE]\n\n")
        self.answer(route, "".join(lines).encode(), **headers)


@contextmanager
def scripted_server():
    script = ScriptedServer()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("transfer-encoding") == "chunked":
                body = self._read_chunks()
            headers = {name.lower(): value for name, value in self.headers.items()}
            script.asked.append(Asked(self.command, self.path, headers, body))
            route = f"{self.command} {self.path.partition('?')[0]}"
            missing = (404, b'{"error":{"message":"no such address"}}', {})
            status, data, extra = script.answers.get(route, missing)
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            for name, value in extra.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def _read_chunks(self):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - the base class names them

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
