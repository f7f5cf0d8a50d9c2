"""Starts the Triton tests in Triton's interpreter, which must be chosen before the first import.

What `make test-interpret` does, as a part of `make test`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
INTERPRETED = (TESTS / "punica_kernels" / "triton", TESTS / "end_to_end" / "test_triton_path.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process"),
]


def test_triton_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = in_the_interpreter(*command, *map(str, INTERPRETED))
    assert " passed" in run.stdout


def test_the_device_script_starts() -> None:
    """Its dry mode goes through every section; the figures mean nothing."""
    run = in_the_interpreter("sh", str(TESTS.parent / "benchmarks" / "device.sh"), "--dry")
    for section in ("checks_passed: True", "e2_passed: True", "kernels (", "decode (", "loads ("):
        assert section in run.stdout
    assert "flashinfer: skipped; attention is its own: FlashInfer runs on CUDA" in run.stdout


def in_the_interpreter(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHON": sys.executable}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return run
