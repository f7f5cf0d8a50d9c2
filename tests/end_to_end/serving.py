"""A real `loraplex serve` in a process of its own, as an operator would start it."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_TIMEOUT_S = 120
COMMAND = [sys.executable, "-c", "from gateway.cli import main; main()"]


@dataclass
class Serving:
    """The running process, its address and what it has said so far."""

    process: subprocess.Popen
    url: str = ""
    ready: dict = field(default_factory=dict)
    events: list[dict] = field(default_factory=list)

    @property
    def pids(self) -> dict:
        """Process ids by role, as the ready event gave them."""
        return self.ready["pids"]

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


@contextmanager
def serving(*arguments: str, state_dir: Path, log: Path):
    """Start `loraplex serve --port 0 --json …`; yield when it is ready; end it afterwards."""
    command = [*COMMAND, "serve", "--port", "0", "--json", "--state-dir", str(state_dir)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    running = Serving(process)
    lines: queue.Queue[bytes | None] = queue.Queue()
    reader = threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        while not running.ready:
            line = lines.get(timeout=START_TIMEOUT_S)
            if line is None:
                raise AssertionError(
                    f"serve ended with {process.wait()}: {running.events[-3:]}\n"
                    + log.read_text(errors="replace")[-4000:]
                )
            event = json.loads(line)
            running.events.append(event)
            if event["event"] == "ready":
                running.ready, running.url = event, event["url"]
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(timeout=10)
        process.stdout.close()


def _forward(stream, lines: "queue.Queue[bytes | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
