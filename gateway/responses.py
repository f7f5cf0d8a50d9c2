"""Answers as JSON."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def json_response(
    document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `document`, a msgspec type or plain containers, as JSON."""
    return Response(
        msgspec.json.encode(document),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )
