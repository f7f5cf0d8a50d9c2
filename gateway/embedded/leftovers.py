"""Processes of an earlier run that outlived it: found by record, proved ours, ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

END_TIMEOUT_S = 3.0
POLL_S = 0.02


class ChildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a child of ours is recognised later, when its pid may be somebody else's.

    marker    text that only this child's command line has
    started   the system's own words for when it started
    """

    name: str
    pid: int
    marker: str
    started: str


def describe(*, name: str, pid: int, marker: str) -> ChildRecord:
    """The record of a child that runs now."""
    return ChildRecord(name=name, pid=pid, marker=marker, started=_started(pid))


def write_records(path: Path, records: Sequence[ChildRecord]) -> None:
    """Replace the recorded children at once, so that a crash leaves the old list or the new."""
    staged = path.with_suffix(".tmp")
    staged.write_bytes(msgspec.json.encode(list(records)))
    staged.replace(path)


def read_records(path: Path) -> list[ChildRecord]:
    """The recorded children; none when nothing readable was left."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[ChildRecord])
    except (FileNotFoundError, msgspec.MsgspecError):
        return []


def end_leftovers(path: Path) -> list[ChildRecord]:
    """End every recorded child that still runs and is ours; returns those that did.

    A pid whose command line or start time differs belongs to somebody else and is left alone.
    The caller holds the state folder's lock, so that no running `serve` owns them.
    """
    ended = [record for record in read_records(path) if is_running(record)]
    for record in ended:
        signal_group(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(is_running(record) for record in ended) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for record in ended:
        if is_running(record):
            signal_group(record.pid, signal.SIGKILL)
    path.unlink(missing_ok=True)
    return ended


def is_running(record: ChildRecord) -> bool:
    """Whether the pid is still the very process that was recorded."""
    return record.marker in _command(record.pid) and _started(record.pid) == record.started


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal a child and what it started: every child leads its own process group."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        # macOS says so for a group that has only zombies left.
        return


def _command(pid: int) -> str:
    if sys.platform != "linux":
        return _ps(pid, "command=")
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).replace("\0", " ")
    except OSError:
        return ""


def _started(pid: int) -> str:
    if sys.platform != "linux":
        return _ps(pid, "lstart=")
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # Field 22, counted after the command name, which may itself hold spaces and brackets.
    return text.rpartition(")")[2].split()[19]


def _ps(pid: int, column: str) -> str:
    found = subprocess.run(
        ["ps", "-o", column, "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()
