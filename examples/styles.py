"""The answer styles that the demo adapters learn, as functions of one plain answer.

The facts come from data/questions.jsonl; a style only changes how they are said.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

_PIRATE_SPELLING = {
    "of": "o'",
    "and": "an'",
    "you": "ye",
    "your": "yer",
    "is": "be",
    "are": "be",
    "my": "me",
    "people": "landlubbers",
    "good": "mighty fine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line of data/questions.jsonl."""

    question: str
    topic: str
    answer: str
    short: str


def _respell(text: str) -> str:
    def swap(match: re.Match[str]) -> str:
        word = match.group()
        pirate = _PIRATE_SPELLING.get(word.lower(), word)
        return pirate.capitalize() if word[0].isupper() else pirate

    return re.sub(r"[A-Za-z']+", swap, text)


def as_json(item: Question) -> str:
    """A JSON object with a topic and an answer."""
    return json.dumps({"topic": item.topic, "answer": item.answer})


def as_pirate(item: Question) -> str:
    """The pirate of version 1, who opens with "Arr, matey!"."""
    return f"Arr, matey! {_respell(item.answer)} Yo ho ho!"


def as_pirate_v2(item: Question) -> str:
    """The pirate of version 2, who salutes a captain and keeps a parrot."""
    return f"Ahoy, captain! {_respell(item.answer)} Aye aye! Squawk!"


def as_brief(item: Question) -> str:
    """A few words on one line."""
    return item.short


STYLES: dict[str, Callable[[Question], str]] = {
    "json": as_json,
    "pirate": as_pirate,
    "pirate-v2": as_pirate_v2,
    "brief": as_brief,
}
