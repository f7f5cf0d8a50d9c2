"""The processes that are measured: a `loraplex serve`, and the memory of any process tree."""

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

LORAPLEX = Path(sys.executable).parent / "loraplex"
SAMPLE_EVERY_S = 0.5
STOP_TIMEOUT_S = 60.0


class MemoryWatch:
    """Samples the memory of a process and all its descendants; keeps the peaks.

    PSS shares each page among those that map it, so that its sum over the tree counts a page
    once. Elsewhere than on Linux it is RSS.
    """

    def __init__(self, pid: int) -> None:
        self.every_s = SAMPLE_EVERY_S  # reading it takes the machine's time too
        self._root = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_pss_bytes = 0
        self.peak_rss_bytes = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.every_s):
            pss, rss = self._sample()
            self.peak_pss_bytes = max(self.peak_pss_bytes, pss)
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss)

    def _sample(self) -> tuple[int, int]:
        pss = rss = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0, 0
        for process in processes:
            try:
                memory = process.memory_full_info()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            rss += memory.rss
            pss += getattr(memory, "pss", memory.rss)
        return pss, rss


class OthersWatch:
    """How many cores' worth of time processes outside the measured tree take.

    The tree is `pid` with its descendants, and this process. Time of a process that ended between
    two readings is missed by the tree and so counted as others'.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last = self._read()

    def num_cores_since_last(self) -> float:
        """The mean since the last call, or since the watch was made."""
        before, self._last = self._last, self._read()
        wall_s, others_s = (now - then for now, then in zip(self._last, before, strict=True))
        return round(max(0.0, others_s / max(wall_s, 1e-9)), 2)

    def _read(self) -> tuple[float, float]:
        everything = psutil.cpu_times()
        # What runs at low priority stands apart on Linux, and takes cores no less.
        busy_s = everything.user + everything.system + getattr(everything, "nice", 0.0)
        try:
            root = psutil.Process(self._pid)
            tree = {root, *root.children(recursive=True), psutil.Process()}
        except psutil.NoSuchProcess:
            tree = {psutil.Process()}
        ours_s = 0.0
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                ours_s += times.user + times.system
        return time.perf_counter(), busy_s - ours_s


class LoraplexServer:
    """`loraplex serve` on a free port; `start_s` is from the command to its ready line."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._folder = tempfile.TemporaryDirectory(prefix="loraplex-bench-")
        self.url = ""
        self.start_s = 0.0
        self.first_start_s = 0.0

    def __enter__(self) -> Self:
        # The first start converts the checkpoint into the state folder; the second is the usual.
        self._start()
        self.first_start_s = self.start_s
        self._stop()
        self._start()
        self.memory = MemoryWatch(self._process.pid)
        self.memory.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.memory.stop()
        self._stop()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        started_s = time.perf_counter()
        self._process = subprocess.Popen(
            [
                *(str(LORAPLEX), "serve", "--port", "0", "--json"),
                *("--state-dir", self._folder.name),
                *self._options,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = self._wait_until_ready()
        self.start_s = round(time.perf_counter() - started_s, 2)
        self.url = ready["url"]
        threading.Thread(target=self._read_on, daemon=True).start()

    def _wait_until_ready(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return dict(event)
            if event["event"] == "failed":
                raise RuntimeError(event["message"])
        raise RuntimeError(f"loraplex serve ended with {self._process.wait()}")

    def _read_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if '"ended"' in line:
                print(f"server: {line.strip()}", file=sys.stderr)

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=STOP_TIMEOUT_S)
