"""The core's side of the loader process: jobs in, results out, never a wait."""

import contextlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from adapters.base_description import BaseDescription
from engine.lora.loader_messages import (
    FrameBuffer,
    LoadBroken,
    LoadDone,
    LoadJob,
    LoadRefused,
    LoadResult,
    encode_frame,
)

__all__ = ["LoadBroken", "LoadDone", "LoadRefused", "LoaderClient"]

LOADER_COMMAND = (sys.executable, "-m", "engine.lora.loader_process")
READ_BYTES = 64 * 1024
EXIT_TIMEOUT_S = 2.0


class LoaderClient:
    """Has adapter files read, checked and cast by a process of their own.

    Owns that process. It has at most one job at a time, the rest wait here: so a job always fits
    into the pipe, and the death of the process costs that job alone, which is answered by
    LoadBroken. The next job starts a new process.
    """

    def __init__(self, *, command: Sequence[str] = LOADER_COMMAND) -> None:
        self._command = tuple(command)
        self._waiting: deque[LoadJob] = deque()
        self._running: LoadJob | None = None
        self._frames = FrameBuffer()
        self._process: subprocess.Popen[bytes] | None = self._start()

    @property
    def is_busy(self) -> bool:
        """Whether a result is still to come."""
        return self._running is not None or bool(self._waiting)

    @property
    def pid(self) -> int | None:
        """The loader process, if there is one."""
        return None if self._process is None else self._process.pid

    def submit(
        self, lora_id: str, *, directory: Path, image_dir: Path, base: BaseDescription, dtype: str
    ) -> None:
        """Ask for the image of a PEFT folder; poll() brings the one result.

        image_dir belongs to this core alone. dtype is the arena's: "bf16" or "fp32".
        """
        self._waiting.append(
            LoadJob(
                lora_id=lora_id,
                directory=str(directory),
                image_dir=str(image_dir),
                base=base,
                dtype=dtype,
            )
        )
        self._send_next()

    def poll(self) -> list[LoadResult]:
        """Return the results that have come since the last call; doesn't wait for any."""
        results: list[LoadResult] = []
        if self._process is not None:
            assert self._process.stdout is not None
            while piece := self._read(self._process.stdout.fileno()):
                for body in self._frames.feed(piece):
                    results.append(msgspec.msgpack.decode(body, type=LoadResult))
                    self._running = None
            if piece == b"":
                results += self._bury(self._process)
        self._send_next()
        return results

    def close(self) -> None:
        """End the process; jobs that are waiting are dropped without a result."""
        self._waiting.clear()
        self._running = None
        if self._process is not None:
            self._end(self._process, timeout_s=EXIT_TIMEOUT_S)
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # One thread: the loader must not compete with the core for more than one processor.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._frames = FrameBuffer()
        return process

    def _send_next(self) -> None:
        if self._running is not None or not self._waiting:
            return
        if self._process is None:
            self._process = self._start()
        self._running = self._waiting.popleft()
        assert self._process.stdin is not None
        # If it has just died, the next poll() finds the end of its output.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(encode_frame(self._running))

    @staticmethod
    def _read(fd: int) -> bytes | None:
        """Return what the pipe has: None if nothing yet, b"" if nothing ever again."""
        try:
            return os.read(fd, READ_BYTES)
        except BlockingIOError:
            return None

    def _bury(self, process: subprocess.Popen[bytes]) -> list[LoadResult]:
        """Forget a process that has closed its output; return its job's failure, if it had one."""
        self._end(process, timeout_s=0.0)
        self._process = None
        job, self._running = self._running, None
        if job is None:
            return []
        message = (
            f"the loader process ended with status {process.returncode} while it laid out "
            f"adapter {job.lora_id!r}; ask for it again"
        )
        return [LoadBroken(lora_id=job.lora_id, message=message)]

    @staticmethod
    def _end(process: subprocess.Popen[bytes], *, timeout_s: float) -> None:
        """Close its input, which ends it; kill it if that takes longer than `timeout_s`."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
