"""What commands print: for people with rich, for scripts as JSON, and how they end."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_SERVER = 3
PIPE_WIDTH = 240


class CliError(Exception):
    """Ends a command with `exit_code`; `body` is what --json shows instead of the message."""

    def __init__(
        self, message: str, *, exit_code: int = EXIT_FAILED, body: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.body = body or {"error": {"message": message, "code": "failed"}}


class Output:
    """Where a command's words go: results to stdout, remarks and errors to stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        # A pipe has no width of its own; there, a table's rows stay whole for grep and awk.
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
        self.console = Console(width=width, highlight=False, soft_wrap=True)
        self.errors = Console(stderr=True, highlight=False, soft_wrap=True)

    def json(self, value: Any) -> None:
        """Print one JSON value on one line."""
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
        sys.stdout.flush()

    def line(self, text: str) -> None:
        """Print one line for a person, exactly as it is; nothing with --json."""
        if not self.as_json:
            self.console.print(text, markup=False)

    def remark(self, text: str) -> None:
        """Print a line beside the result, on stderr; nothing with --json."""
        if not self.as_json:
            self.errors.print(text, markup=False, style="yellow")

    def table(self, table: Table) -> None:
        if not self.as_json:
            self.console.print(table)

    def error(self, error: CliError) -> None:
        if self.as_json:
            self.json(error.body)
        else:
            self.errors.print(f"[red]error:[/red] {escape(str(error))}")


@contextmanager
def reporting(*, as_json: bool) -> Iterator[Output]:
    """Run a command's body; a CliError becomes its words and its exit code."""
    output = Output(as_json=as_json)
    try:
        yield output
    except CliError as error:
        output.error(error)
        raise typer.Exit(error.exit_code) from error


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table that stays readable in a narrow terminal and in a pipe."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def human_bytes(num_bytes: float) -> str:
    """A byte count with a unit that leaves at most four digits: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
