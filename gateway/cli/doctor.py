"""`loraplex doctor`: is everything here that serving needs?"""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import typer
from rich.markup import escape

from gateway.cli import engine_flags as flags
from gateway.cli.flags import JsonFlag
from gateway.cli.listening import bind
from gateway.cli.output import EXIT_FAILED, CliError, human_bytes, plain_table, reporting
from gateway.embedded import own_packages
from gateway.embedded.default_model import find_default_model
from gateway.embedded.errors import EmbeddedError
from gateway.embedded.kernels import describe_kernels
from gateway.embedded.machine import available_memory_bytes
from gateway.embedded.state import StateFolder, default_state_dir
from gateway.embedded.valkey import find_binary

MIN_DISK_BYTES = 2 << 30
MIN_MEMORY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. status "ok", "warning" (serving works) or "failed"."""

    name: str
    status: str
    text: str


def doctor(
    host: flags.HostFlag = "127.0.0.1",
    port: flags.PortFlag = 8000,
    state_dir: flags.StateDirFlag = None,
    json: JsonFlag = False,
) -> None:
    """Check this machine and environment; exit code 1 if serving can't work here."""
    folder = StateFolder(root=(state_dir or default_state_dir()).expanduser().absolute())
    with reporting(as_json=json) as output:
        findings = examine(folder=folder, host=host, port=port)
        failed = [finding.name for finding in findings if finding.status == "failed"]
        if json:
            output.json({"ok": not failed, "checks": findings})
        table = plain_table("CHECK", "", "FOUND")
        for finding in findings:
            color = {"ok": "green", "warning": "yellow", "failed": "red"}[finding.status]
            status = f"[{color}]{finding.status}[/{color}]"
            table.add_row(finding.name, status, escape(finding.text))
        output.table(table)
        if failed and json:
            raise typer.Exit(EXIT_FAILED)
        if failed:
            raise CliError(f"serving can't work here yet: {', '.join(failed)}")


def examine(*, folder: StateFolder, host: str, port: int) -> list[Finding]:
    """Look at everything; changes nothing but that the state folder is made."""
    return [
        _python(),
        _torch(),
        *_kernels(folder.root),
        _required("registry", lambda: f"Valkey at {find_binary()}"),
        _default_model(),
        _required("state folder", lambda: _prepared(folder)),
        _port(host, port),
        _disk(folder.root),
        _memory(),
        _adapters_package(),
    ]


def _required(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, status="ok", text=look())
    except EmbeddedError as error:
        return Finding(name=name, status="failed", text=str(error))


def _python() -> Finding:
    is_new_enough = sys.version_info >= (3, 11)
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(name="python", status="ok" if is_new_enough else "failed", text=text)


def _torch() -> Finding:
    # By its metadata: importing it takes seconds, and the gateway never does.
    try:
        return Finding(name="torch", status="ok", text=metadata.version("torch"))
    except metadata.PackageNotFoundError:
        text = "not installed; run: pip install 'torch>=2.9,<2.14'"
        return Finding(name="torch", status="failed", text=text)


def _kernels(state_dir: Path) -> list[Finding]:
    """Say which kernels the engine runs on here: on the CPU, then on each CUDA device."""
    report = describe_kernels(state_dir)
    text = f"{report.kernels or 'unknown'}: {report.text}"
    cpu = Finding(name="kernels", status=_status_with(report.kernels), text=text)
    devices = [
        Finding(name=device.name, status=_status_with(device.kernels), text=device.text)
        for device in report.devices
    ]
    return [cpu, *devices]


def _status_with(kernels: str | None) -> str:
    """A warning, not a failure: plain torch is only slower, and the CPU serves without a device."""
    return "warning" if kernels in {None, "torch"} else "ok"


def _default_model() -> Finding:
    try:
        return Finding(name="default model", status="ok", text=find_default_model().name)
    except EmbeddedError as error:
        return Finding(name="default model", status="warning", text=str(error))


def _prepared(folder: StateFolder) -> str:
    folder.prepare()
    return str(folder.root)


def _port(host: str, port: int) -> Finding:
    try:
        listener: socket.socket = bind(host, port)
    except EmbeddedError as error:
        return Finding(name="port", status="warning", text=str(error))
    with listener:
        return Finding(name="port", status="ok", text=f"{host}:{port} is free")


def _disk(root: Path) -> Finding:
    there = next(path for path in (root, *root.parents) if path.exists())
    num_free = shutil.disk_usage(there).free
    status = "ok" if num_free >= MIN_DISK_BYTES else "warning"
    return Finding(name="disk", status=status, text=f"{human_bytes(num_free)} free at {there}")


def _memory() -> Finding:
    num_bytes = available_memory_bytes()
    if num_bytes is None:
        return Finding(name="memory", status="ok", text="this system doesn't say how much is free")
    status = "ok" if num_bytes >= MIN_MEMORY_BYTES else "warning"
    text = f"{human_bytes(num_bytes)} available, {os.cpu_count()} CPU cores"
    return Finding(name="memory", status=status, text=text)


def _adapters_package() -> Finding:
    problem = own_packages.find_problem()
    if problem is None:
        return Finding(name="packages", status="ok", text="`adapters` is Loraplex's own")
    return Finding(name="packages", status="failed", text=problem)
