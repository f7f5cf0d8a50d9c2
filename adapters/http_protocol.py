"""HTTP/1.1 for our servers: httptools' parser, a limit on what it would collect without end, and
a short way for the pieces of a stream.
"""

from typing import cast

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# A request line with its headers, the lines before a chunk, trailers.
MAX_HEAD_BYTES = 32 * 1024
SERVER_SEND = "loraplex.server_send"


def send_of_pieces(scope: Scope, send: Send) -> Send:
    """Return what takes the pieces of a body once its response has started by `send`.

    Layers around a route look at the start of a response only, so pieces needn't go through all
    of them. A layer that looks at more takes SERVER_SEND out of the scope.
    """
    server_send: Send = scope.get(SERVER_SEND, send)
    return server_send


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, which answers 400 to a head that doesn't end.

    The parser keeps a head until it is whole; bodies are bounded by those who read them.
    `_num_head_bytes` counts what has come since the last piece of a body, or the end of a head or
    a message. One read may pass the limit with a head that is whole.
    """

    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # not so of an upgrade
            cast("Scope", self.scope)[SERVER_SEND] = self.cycle.send

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()
