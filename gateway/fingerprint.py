"""The digest of a request, by which a repeated one is known."""

import hashlib

from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.types import Scope


class Fingerprint:
    """Digests a request while its body comes in.

    A form's boundary is chosen anew whenever the form is sent, so it isn't digested: what lies
    between two boundaries is digested piece by piece, and then the pieces' digests.
    """

    def __init__(self, scope: Scope) -> None:
        kind, options = parse_options_header(Headers(scope=scope).get("content-type"))
        self._whole = hashlib.sha256()
        for text in (scope["method"].encode(), scope["path"].encode(), scope["query_string"], kind):
            self._whole.update(hashlib.sha256(text).digest())
        boundary = options.get(b"boundary") if kind == b"multipart/form-data" else None
        self._delimiter = b"--" + boundary if boundary else None
        self._piece = hashlib.sha256()
        self._kept = b""

    def update(self, data: bytes) -> None:
        if self._delimiter is None:
            self._piece.update(data)
            return
        *pieces, rest = (self._kept + data).split(self._delimiter)
        for piece in pieces:
            self._piece.update(piece)
            self._end_piece()
        # A boundary may be cut in two by the way in which the body comes in.
        may_be_cut = len(self._delimiter) - 1
        self._piece.update(rest[:-may_be_cut])
        self._kept = rest[-may_be_cut:]

    def hexdigest(self) -> str:
        """Return the digest of all that came; call it once, at the end."""
        self._piece.update(self._kept)
        self._end_piece()
        return self._whole.hexdigest()

    def _end_piece(self) -> None:
        self._whole.update(self._piece.digest())
        self._piece = hashlib.sha256()
