"""Asks an engine process which kernels it would run on here; the gateway itself can't look."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPORT_COMMAND = (sys.executable, "-m", "engine.server.kernel_report")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """A CUDA device as an engine sees it.

    name      as torch has it, such as "cuda:0"
    kernels   that an engine would take there; None: the device can't be used
    text      what it is and why these, or what went wrong, in words
    """

    name: str
    kernels: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What an engine would run on here.

    kernels   that it would take on the CPU; None: it could not be asked
    text      why these, or what went wrong, in words
    devices   of CUDA, in torch's order; none where torch finds no CUDA
    """

    kernels: str | None
    text: str
    devices: tuple[DeviceReport, ...] = ()


def describe_kernels(state_dir: Path) -> KernelReport:
    """Have an engine say what it would run on here."""
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
        return KernelReport(
            kernels=report["kernels"],
            text=f"{report['reason']}; OpenMP: {runtimes}",
            devices=tuple(
                DeviceReport(name=entry["name"], kernels=entry["kernels"], text=entry["text"])
                for entry in report.get("devices", [])
            ),
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return KernelReport(kernels=None, text="the engine could not be asked")
