"""Text from strangers, made fit to be shown: no control characters, no half characters."""

from collections.abc import Iterable

_MAX_SHOWN = 4


def printable(text: str) -> str:
    """Replace what a terminal or a JSON encoder would stumble over by its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(names: Iterable[str]) -> str:
    """List a few names and count the others."""
    listed = list(names)
    more = f" and {len(listed) - _MAX_SHOWN} more" if len(listed) > _MAX_SHOWN else ""
    return ", ".join(name[:160] for name in listed[:_MAX_SHOWN]) + more
