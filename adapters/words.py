"""Text from strangers, made fit to be shown: no control characters, no half characters."""


def printable(text: str) -> str:
    """Replace what a terminal or a JSON encoder would stumble over by its escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
