"""Which of our processes gets a core first where all are busy.

A server that is woken by each of a step's tokens tears the engine's threads apart, which wait for
each other. So servers wait for the end of a time slice, some milliseconds, and handle then in one
go what has come meanwhile. Where a core is free nothing changes. It is Linux's batch policy
(man 7 sched), which children inherit; other systems have nothing like it.
"""

import contextlib
import os


def wait_for_others() -> None:
    """Let busy threads end their slice before this thread, and what it starts, is run."""
    if hasattr(os, "SCHED_BATCH"):
        _set(os.SCHED_BATCH)


def take_turns_as_usual() -> None:
    """Undo what was inherited from a parent that waits for others."""
    if hasattr(os, "SCHED_OTHER"):
        _set(os.SCHED_OTHER)


def _set(policy: int) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, policy, os.sched_param(0))
