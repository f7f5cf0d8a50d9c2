"""What the demo prints: tables, and a line for each thing that it checked."""

import json
from typing import Any

from demo_client import Answer
from predicates import PREDICATES
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FIRST_CHARACTERS = 46
LOG_WIDTH = 110  # of a log file, which has no width of its own


class Checks:
    """Prints each check as it is made and counts those that failed."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = LOG_WIDTH
        self._num_made = 0
        self._failed: list[str] = []

    def title(self, text: str) -> None:
        """Begin a part of the demo."""
        self._console.print(f"\n[bold]{escape(text)}[/bold]")

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def expect(self, what: str, holds: bool, detail: str = "") -> None:
        """Print and count one check."""
        self._num_made += 1
        if not holds:
            self._failed.append(what)
        mark = "[green]✓[/green]" if holds else "[red]✗[/red]"
        shown = f"  [dim]{escape(' '.join(detail.split()))}[/dim]" if detail else ""
        self._console.print(f"  {mark} {escape(what)}{shown}")

    def json_of(self, output: bytes) -> dict[str, Any]:
        """The JSON object that a command printed; an empty one, and a failed check, if none."""
        try:
            return dict(json.loads(output))
        except ValueError:
            self.expect("the command prints JSON", False, output.decode(errors="replace"))
            return {}

    def summary(self) -> int:
        """Print the result and return the exit code."""
        if self._failed:
            self._console.print(f"\n[red]{len(self._failed)} of {self._num_made} checks failed:")
            for what in self._failed:
                self._console.print(f"  [red]✗[/red] {escape(what)}")
            return 1
        self._console.print(f"\n[green]all {self._num_made} checks hold[/green]")
        return 0


def answers_table(answers: list[Answer], labels: dict[str, str]) -> Table:
    """One line for each answer; `labels` names versions by digest."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("adapter", "version"):
        table.add_column(name, no_wrap=True)
    for name in ("TTFT", "tok/s", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("style", no_wrap=True)
    table.add_column("first words")
    for answer in answers:
        _, _, adapter = answer.model.partition(":")
        table.add_row(
            adapter or "(base)",
            labels.get(answer.version, answer.version[:19]),
            f"{answer.ttft_s * 1000:.0f} ms",
            f"{answer.tokens_per_s:.1f}" if answer.num_tokens > 1 else "-",
            str(answer.num_tokens),
            _mark(adapter.partition("@")[0], answer.text),
            escape(" ".join(answer.text.split())[:FIRST_CHARACTERS]),
        )
    return table


def _mark(adapter: str, text: str) -> str:
    if not adapter:
        return "[dim]-[/dim]"
    return "[green]✓[/green]" if PREDICATES[adapter](text) else "[red]✗[/red]"
