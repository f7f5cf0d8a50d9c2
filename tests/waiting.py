"""Waiting for another process: a bounded poll, never a bare sleep."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], *, timeout_s: float = 20) -> None:
    """Return as soon as `condition()` is true; fail the test if it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.05)
