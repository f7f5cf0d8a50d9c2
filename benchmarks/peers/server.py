"""A peer with an OpenAI-compatible server: started, waited for, watched, stopped."""

import os
import signal
import socket
import subprocess
import time
from abc import abstractmethod
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from harness import Call
from processes import STOP_TIMEOUT_S, MemoryWatch

from peers.peer import ADAPTER_PREFIX, BASE, Adapter, Peer, Setup

START_TIMEOUT_S = 600.0
LAST_LINES = 15
ADAPTERS = "<adapters>"


class ServerPeer(Peer):
    """A server of its own process group; its output goes to the setup's log.

    start_s        from the command to the first healthy answer
    first_token_s  from the command to the first token of the first request
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.start_s = 0.0
        self.first_token_s = 0.0
        self.url = ""

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """The command line, with every flag that matters."""

    def environment(self) -> dict[str, str]:
        """What is set in the environment besides what is there."""
        return {}

    def flags(self) -> str:
        """The command and the environment in one line; adapters' paths are counted, not listed."""
        settings = [f"{name}={value}" for name, value in self.environment().items()]
        return shortened(" ".join([*settings, *self.command(0)]))

    def is_ready(self) -> bool:
        """Whether it answers; called again and again."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def call(self, prompt_ids: list[int], adapter: Adapter | None) -> Call:
        """A request of the base, or of one adapter."""
        return Call(model=BASE if adapter is None else adapter.name, prompt_ids=prompt_ids)

    def load(self, adapter: Adapter) -> None:
        """Bring in an adapter that it has never seen, as its users do."""
        raise NotImplementedError(f"{self.title} loads no adapters while it runs")

    def prepare(self) -> None:
        """Bring in the setup's adapters, where the command line doesn't."""

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        started_s = time.perf_counter()
        with self.setup.log.open("w") as log:
            self._process = subprocess.Popen(
                self.command(port),
                env=os.environ | self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.memory = MemoryWatch(self._process.pid)
        self.memory.start()
        try:
            self._wait(started_s)
            self.start_s = round(time.perf_counter() - started_s, 2)
            self._first_token()
            self.first_token_s = round(time.perf_counter() - started_s, 2)
            self.prepare()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> list[dict[str, Any]]:
        """Each process of the tree: what it runs, and its memory now."""
        root = psutil.Process(self.pid)
        found = []
        for process in [root, *root.children(recursive=True)]:
            try:
                memory, line = process.memory_full_info(), process.cmdline()
            except psutil.NoSuchProcess:
                continue
            pss = getattr(memory, "pss", memory.rss)
            found.append({"what": shortened(" ".join(line))[:120], "pss_bytes": pss})
        return found

    def _wait(self, started_s: float) -> None:
        while not self.is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"{self.title} ended with {self._process.returncode}: {self._said()}"
                )
            if time.perf_counter() - started_s > START_TIMEOUT_S:
                raise RuntimeError(f"{self.title} isn't ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def _first_token(self) -> None:
        body = {"model": BASE, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600, trust_env=False)
        if answer.is_error:
            raise RuntimeError(f"{self.title}: {answer.status_code}: {answer.text[:500]}")

    def _said(self) -> str:
        lines = self.setup.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-LAST_LINES:])

    def _stop(self) -> None:
        self.memory.stop()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shortened(line: str) -> str:
    """The same command with folders cut to their last part, and adapters counted, not listed."""
    words, num_adapters = [], 0
    for word in line.split(" "):
        name, equals, value = word.rpartition("=")
        if value.count(",") and "/" in value:
            num_adapters += value.count(",") + 1
        elif name.startswith(ADAPTER_PREFIX):
            num_adapters += 1
        else:
            parts = [part.rpartition("/")[2] for part in value.split(":")]
            words.append(name + equals + ":".join(parts))
            continue
        if words[-1] != ADAPTERS:
            words.append(ADAPTERS)
    return " ".join(words).replace(ADAPTERS, f"<{num_adapters} adapters>")
