"""What a result needs beside its figures: when, how, of which code, on which machine."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent


def describe_run(now: datetime, *, libraries: Sequence[str]) -> dict[str, Any]:
    """The first fields of every result file."""
    script = Path(sys.argv[0]).name
    return {
        "date": now.isoformat(timespec="seconds"),
        "command": f"python benchmarks/{script} {' '.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "machine": _machine(),
        "versions": {name: metadata.version(name) for name in libraries},
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
