"""One operating-system process of ours: started, watched, ended, never left behind."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from gateway.embedded import die_with_parent
from gateway.embedded.errors import ChildFailed
from gateway.embedded.leftovers import signal_group

MAX_LINE_BYTES = 1 << 20
LOG_TAIL_BYTES = 4096


class Child(Protocol):
    """What the supervisor keeps alive. Only the supervisor calls these."""

    @property
    def name(self) -> str:
        """What people and records call it."""

    @property
    def marker(self) -> str:
        """Text that only this child's command line has."""

    @property
    def pid(self) -> int | None:
        """The pid of the running process; None before the first and between two of them."""

    async def spawn(self) -> None:
        """Start the process without waiting until it serves; raises ChildFailed."""

    async def wait_ready(self) -> None:
        """Return once it serves; raises ChildFailed, with its own words, if it can't."""

    async def wait(self) -> int:
        """Return the exit status once the process has ended."""

    async def stop(self, *, timeout_s: float) -> None:
        """Ask it to end, and end it by force after `timeout_s`."""

    def kill(self) -> None:
        """End it and whatever it started, now."""


class ChildProcess:
    """A process that leads its own group, so that Ctrl-C in a terminal reaches us alone.

    On Linux the kernel kills it when we die; everywhere its stdin is a pipe of ours that then
    reads end-of-file. Its stdout is ours when `reads_stdout`, else it goes to the log with stderr.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], *, log: Path, env: Mapping[str, str], reads_stdout: bool
    ) -> "ChildProcess":
        """Start `command`; its log is begun anew, the one before kept as `.old`."""
        try:
            with _begin_log(log) as sink:
                process = await asyncio.create_subprocess_exec(
                    *_with_parent(command),
                    stdin=PIPE,
                    stdout=PIPE if reads_stdout else sink,
                    stderr=sink,
                    env=dict(env),
                    start_new_session=True,
                    limit=MAX_LINE_BYTES,
                )
        except OSError as error:
            raise ChildFailed(f"{command[0]} can't be started ({error})") from error
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def read_line(self) -> bytes:
        """The next line of stdout; empty at its end. A line over MAX_LINE_BYTES reads as "\\n"."""
        assert self._process.stdout is not None, "started without reads_stdout"
        try:
            return await self._process.stdout.readline()
        except ValueError:
            return b"\n"

    async def wait(self) -> int:
        """Return the exit status; what the process had started is ended too."""
        status = await self._process.wait()
        self.kill_group()
        return status

    async def stop(self, *, timeout_s: float) -> None:
        if not self.has_ended:
            self._process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.kill_group()
            await self._process.wait()
        self.kill_group()

    def kill_group(self) -> None:
        """End the process and all that it started; no harm when they have ended."""
        signal_group(self.pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """An exit status in words: a signal's name, or the code."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with code {status}"


def last_words(log: Path) -> str:
    """The last line of a log that says anything, for a one-line error; empty if there's none."""
    try:
        with log.open("rb") as lines:
            lines.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            text = lines.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    said = [line.strip() for line in text.splitlines() if line.strip()]
    return said[-1] if said else ""


def _begin_log(path: Path) -> BinaryIO:
    """Open a new log that this user alone may read; the one before stays as `.old`."""
    if path.exists():
        path.replace(path.with_suffix(".old"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _with_parent(command: Sequence[str]) -> list[str]:
    if sys.platform != "linux":
        return list(command)
    script = die_with_parent.__file__
    return [sys.executable, "-I", "-S", script, str(os.getpid()), *command]
