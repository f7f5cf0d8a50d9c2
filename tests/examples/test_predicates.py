"""A predicate holds for every answer of its own style and for none of another."""

import json
from pathlib import Path

import pytest

from examples.predicates import PREDICATES, pirate_version
from examples.styles import STYLES, Question

DATA = Path(__file__).parents[2] / "examples" / "data"
QUESTIONS = [
    Question(**json.loads(line)) for line in (DATA / "questions.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("style", PREDICATES)
def test_a_predicate_holds_for_its_own_style_and_no_other(style: str) -> None:
    for item in QUESTIONS:
        held = {name for name, holds in PREDICATES.items() if holds(STYLES[style](item))}
        assert held == {style}


def test_no_predicate_holds_for_a_plain_answer() -> None:
    plain = "The sky looks blue because air scatters blue light more than red light."

    assert not any(holds(plain) for holds in PREDICATES.values())


def test_no_predicate_holds_for_an_empty_answer() -> None:
    assert not any(holds("") for holds in PREDICATES.values())


def test_the_two_pirates_can_be_told_apart() -> None:
    assert {pirate_version(STYLES["pirate"](item)) for item in QUESTIONS} == {1}
    assert {pirate_version(STYLES["pirate-v2"](item)) for item in QUESTIONS} == {2}
    assert pirate_version("Hello there.") is None


def test_no_held_out_prompt_was_trained_on() -> None:
    held_out = json.loads((DATA / "held_out_prompts.json").read_text())

    assert len(set(held_out)) == 10
    assert not set(held_out) & {item.question for item in QUESTIONS}
    assert len({item.question for item in QUESTIONS}) == len(QUESTIONS)
