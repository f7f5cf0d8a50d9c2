"""Asks an engine process which kernels it would run on here; the gateway itself can't look."""

import json
import subprocess
import sys
from pathlib import Path

REPORT_COMMAND = (sys.executable, "-m", "engine.server.kernel_report")
_TIMEOUT_S = 60.0


def describe_kernels(state_dir: Path) -> tuple[str, str]:
    """Return the kernels' name and, in words, why these; ("", what went wrong) if it can't say."""
    try:
        done = subprocess.run(
            [*REPORT_COMMAND, str(state_dir)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        report = json.loads(done.stdout)
        runtimes = ", ".join(report["openmp"]) or "none found"
        return report["kernels"], f"{report['reason']}; OpenMP: {runtimes}"
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return "", "the engine could not be asked"
