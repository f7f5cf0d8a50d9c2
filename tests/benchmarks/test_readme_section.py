"""A run replaces its own part of the README, and nothing else."""

import pytest
from readme_section import replace_section

TEXT = (
    "Before.\n<!-- a: begin -->\nold\n<!-- a: end -->\nBetween <!-- b: begin -->\n<!-- b: end -->\n"
)


def test_what_stands_between_the_marks_is_replaced(tmp_path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TEXT)

    replace_section("a", "| new |", readme=readme)
    replace_section("a", "| newer |", readme=readme)

    assert readme.read_text() == TEXT.replace("old", "| newer |")


def test_a_readme_without_the_marks_is_left_alone(tmp_path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(TEXT)

    with pytest.raises(SystemExit, match="no marks"):
        replace_section("c", "lost", readme=readme)

    assert readme.read_text() == TEXT
