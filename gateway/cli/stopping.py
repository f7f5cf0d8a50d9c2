"""Ctrl-C and SIGTERM: the first drains, the second ends at once."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Set by the first signal. A second one calls `at_once`, which doesn't return."""

    def __init__(self, *, at_once: Callable[[], None]) -> None:
        self._asked = asyncio.Event()
        self._at_once = at_once

    def __enter__(self) -> "StopRequest":
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            # A program started with `nohup` is meant to outlive its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        """Return once a stop is asked for."""
        await self._asked.wait()

    def _on_signal(self) -> None:
        if self._asked.is_set():
            self._at_once()
        self._asked.set()

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, or cancel it once a stop is asked for and return when it has ended."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()
