"""How `serve` tells what it does: lines and tables for a person, JSON lines for a program."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from gateway.cli.output import Output, human_bytes, plain_table
from gateway.embedded.events import (
    ChildEnded,
    ChildRestarted,
    Event,
    Failed,
    Progress,
    Ready,
    Settings,
    Stopped,
    Stopping,
    WorkerReady,
)

Report = Callable[[Event], None]


def make_report(output: Output) -> Report:
    """The function that events are given to; it never fails, even when nobody reads any more."""
    tell: Report = output.json if output.as_json else TextReport(output)

    def report(event: Event) -> None:
        try:
            tell(event)
        except (BrokenPipeError, SystemExit):  # the second is how rich says the first
            _discard_stdout()

    return report


def _discard_stdout() -> None:
    """Let all later output go nowhere: a server outlives the pipe that its words went to."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


class TextReport:
    """Prints each event as it comes, with the seconds since the start."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._started = time.monotonic()

    def __call__(self, event: Event) -> None:
        match event:
            case Progress(step=step, text=text):
                self._step(step, text)
            case Settings():
                self._output.console.print(_settings_table(event))
            case WorkerReady(name=name, pid=pid, details=details):
                self._step(name, f"ready (pid {pid})")
                self._output.console.print(_memory_table(details))
            case ChildEnded(name=name, reason=reason, retry_in_s=retry_in_s):
                when = "now" if retry_in_s == 0 else f"in {retry_in_s:g} s"
                self._step(name, f"{reason}; starting it again {when}", style="yellow")
            case ChildRestarted(name=name, pid=pid, after_s=after_s):
                self._step(name, f"serves again after {after_s:.1f} s (pid {pid})")
            case Ready():
                self._ready(event)
            case Stopping(text=text):
                self._step("stop", text)
            case Stopped():
                self._step("stop", "every process has ended")
            case Failed(message=message):
                self._output.errors.print(f"[red]error:[/red] {escape(message)}")

    def _step(self, step: str, text: str, *, style: str = "") -> None:
        since_s = time.monotonic() - self._started
        line = f"[dim]{since_s:6.1f} s[/dim]  [cyan]{escape(step):<10}[/cyan] {escape(text)}"
        self._output.console.print(line, style=style)

    def _ready(self, event: Ready) -> None:
        model = event.models[-1] if event.models else "MODEL"
        body = msgspec.json.encode(
            {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
        ).decode()
        lines = [
            "",
            f"Loraplex serves at {event.url}  (in {event.start_s:.1f} s; models: "
            f"{', '.join(event.models) or 'none yet'})",
            "",
            f"  curl {event.url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
            f"  loraplex chat {model} --url {event.url}",
            "",
            "Ctrl-C stops it: running requests are finished first; a second Ctrl-C ends at once.",
        ]
        for line in lines:
            self._output.line(line)


def _settings_table(event: Settings) -> Table:
    table = plain_table("SETTING", "VALUE", "FROM")
    for name, value in event.values.items():
        source = event.sources[name]
        style = "dim" if source == "default" else ""
        table.add_row(name, escape(value), source, style=style)
    return table


def _memory_table(details: dict[str, Any]) -> Table:
    """What the worker measured, and how it split it, from its ready message."""
    table = plain_table("MEMORY", "", title=None)
    for name, num_bytes in (details.get("memory") or {}).items():
        table.add_row(name.replace("_", " ").removesuffix(" bytes"), human_bytes(num_bytes))
    if "num_blocks" in details:
        size = details.get("block_size")
        of_tokens = f" of {size} tokens" if size else ""
        table.add_row("KV blocks", f"{details['num_blocks']:,}{of_tokens}")
    for group, num_rows in (details.get("lora_rows") or {}).items():
        table.add_row(f"LoRA rank rows, {group}", f"{num_rows:,}")
    return table
