"""Starts a benchmark again as an engine core is started: one OpenMP runtime for torch and numba."""

import os
import sys
from pathlib import Path

from engine.server.core_environment import become

STATE_DIR = Path(__file__).resolve().parents[1] / "build" / "benchmarks"
_MARK = "LORAPLEX_BENCHMARK_STARTED"


def start_as_a_core() -> None:
    """Replace this process, once."""
    if _MARK not in os.environ:
        become(sys.argv, STATE_DIR, **{_MARK: "1"})
