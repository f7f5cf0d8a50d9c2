"""Starts the test run again in the environment of an engine core.

The run that a person has started replaces itself by one that was started as a core is.
"""

import os
import sys
from pathlib import Path

import pytest

from engine.server.core_environment import become

_STATE_DIR = Path(__file__).parents[1] / "build" / "tests"
_MARK = "LORAPLEX_TESTS_STARTED"


def start_again_with_one_openmp(config: pytest.Config) -> None:
    """Replace this process, unless that was done or it isn't a run of its own."""
    if _MARK in os.environ or hasattr(config, "workerinput"):
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()  # gives the terminal back
    sys.stdout.flush()
    sys.stderr.flush()
    become(["-m", "pytest", *sys.argv[1:]], _STATE_DIR, **{_MARK: "1"})
