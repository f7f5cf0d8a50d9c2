"""Server-sent events as bytes: cut at event ends, never parsed per token."""

import re
from typing import Any

import msgspec

from gateway.errors import GatewayError, error_body

DONE = b"data: [DONE]\n\n"
# An event ends with an empty line; "\r" before the first of its two "\n" is part of the event.
_EVENT_END = re.compile(rb"\n\r?\n")
# A usage event has no choices. Inside a string the quotes would be escaped, so text can't match.
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')


class EventTooLong(ValueError):
    """An upstream sent more bytes without an event end than any event has."""


class EventCutter:
    """Collects bytes as they come and gives back whole events, each with its end."""

    def __init__(self, *, max_event_bytes: int = 8 * 1024**2) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that `data` completes, in order."""
        # What comes is one event nearly always. Others' first newline is somewhere else.
        if not self._rest and data.endswith(b"\n\n") and data.find(b"\n") == len(data) - 2:
            return [data]
        # An end may lie across the two pieces, three bytes back at most.
        search_from = max(0, len(self._rest) - 3)
        self._rest += data
        events: list[bytes] = []
        start = 0
        for end in _EVENT_END.finditer(self._rest, search_from):
            events.append(bytes(self._rest[start : end.end()]))
            start = end.end()
        del self._rest[:start]
        if len(self._rest) > self._max_event_bytes:
            raise EventTooLong(f"no event end within {self._max_event_bytes} bytes")
        return events

    @property
    def rest(self) -> bytes:
        """Bytes after the last whole event."""
        return bytes(self._rest)


def is_comment(event: bytes) -> bool:
    """True for keep-alive comments, which carry nothing."""
    return event.startswith(b":")


def is_done(event: bytes) -> bool:
    """True for the event that ends a stream."""
    return event.startswith(b"data:") and event[5:].strip() == b"[DONE]"


def usage_of(event: bytes) -> dict[str, Any] | None:
    """Return the usage of a usage-only event (empty `choices`), or None for any other event."""
    if not event.startswith(b"data:") or b'"usage"' not in event or not _NO_CHOICES.search(event):
        return None
    try:
        document = msgspec.json.decode(event[5:].strip())
    except msgspec.DecodeError:
        return None
    if not isinstance(document, dict) or document.get("choices") != []:
        return None
    usage = document.get("usage")
    return usage if isinstance(usage, dict) else None


def error_event(error: GatewayError) -> bytes:
    """Return the event that reports `error` in the middle of a stream."""
    return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n"
