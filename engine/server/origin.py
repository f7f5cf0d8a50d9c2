"""Whose request it is: headers that a gateway sets, and nobody else's business."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.server.errors import invalid

SALT_HEADER = "x-loraplex-salt"
TENANT_HEADER = "x-loraplex-tenant"
PRIORITY_HEADER = "x-loraplex-priority"

_MAX_LENGTH = 256
_PRIORITY = re.compile(r"[+-]?[0-9]{1,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who asks: whose cached blocks may be read, whose share is used, and how urgent it is."""

    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0


def origin_of(headers: Mapping[str, str]) -> Origin:
    """Read the three headers; a request without them is nobody's, and not urgent."""
    for name in (SALT_HEADER, TENANT_HEADER):
        if len(headers.get(name, "")) > _MAX_LENGTH:
            raise invalid(f"longer than {_MAX_LENGTH} characters", name)
    priority = headers.get(PRIORITY_HEADER, "0").strip()
    if not _PRIORITY.fullmatch(priority):
        raise invalid("must be a whole number of at most six digits", PRIORITY_HEADER)
    return Origin(
        cache_salt=headers.get(SALT_HEADER, ""),
        tenant=headers.get(TENANT_HEADER, ""),
        priority=int(priority),
    )
