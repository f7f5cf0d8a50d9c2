"""What each demo adapter promises about its text, as a question with a yes or no.

Plain Python over one string, so that the demo, the training script and tests ask the same thing.
"""

import json
import re
from collections.abc import Callable

MAX_BRIEF_WORDS = 8

_PIRATE_WORDS = re.compile(
    r"\b(?:arr+|ahoy|matey|ye|yer|aye|yo ho|captain|squawk|o'|an')(?!\w)", re.IGNORECASE
)


def is_json_object(text: str) -> bool:
    """The whole text is one JSON object with something in it."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and bool(value)


def sounds_like_pirate(text: str) -> bool:
    """At least two different words that only a pirate says."""
    return len({word.lower() for word in _PIRATE_WORDS.findall(text)}) >= 2


def is_one_short_line(text: str) -> bool:
    """One line of at most MAX_BRIEF_WORDS words."""
    line = text.strip()
    return "\n" not in line and 1 <= len(line.split()) <= MAX_BRIEF_WORDS


def pirate_version(text: str) -> int | None:
    """Which pirate speaks: 1 begins with "Arr", 2 with "Ahoy"; None is no pirate."""
    opening = text.lstrip().lower()
    if opening.startswith("arr"):
        return 1
    return 2 if opening.startswith("ahoy") else None


PREDICATES: dict[str, Callable[[str], bool]] = {
    "json": is_json_object,
    "pirate": sounds_like_pirate,
    "brief": is_one_short_line,
}
