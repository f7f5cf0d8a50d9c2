"""What one HTTP request has running in the core."""

import asyncio
from collections.abc import Callable, Sequence

from engine.errors import EngineError
from engine.protocol import SequenceOutput
from engine.server.errors import CoreReported

Arrival = tuple[int, SequenceOutput | EngineError]


class Flight:
    """The core requests of one HTTP request, sharing one queue.

    Whoever got it closes it. `close` never waits, so that it works in a task that is being
    cancelled.
    """

    def __init__(self, request_ids: Sequence[str], *, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._open = dict(zip(request_ids, range(len(request_ids)), strict=True))
        self._aborted: set[int] = set()
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()

    def expects(self, request_id: str) -> bool:
        """Tell whether this request may still bring something."""
        return request_id in self._open

    async def next_output(
        self, timeout_s: float | None = None
    ) -> tuple[int, SequenceOutput] | None:
        """Wait for the next output, or return None after `timeout_s`.

        The number says which of the added requests it belongs to. Raises what failed a request;
        the others are aborted by `close`.
        """
        while (arrival := await self._next_arrival(timeout_s)) is not None:
            index, what = arrival
            if index in self._aborted:
                continue
            if isinstance(what, EngineError):
                raise what
            return index, what
        return None

    def abort(self, index: int) -> None:
        """Tell the core to forget one of the requests; nothing more of it arrives."""
        self._aborted.add(index)
        for request_id, known in list(self._open.items()):
            if known == index:
                del self._open[request_id]
                self._forget(request_id)

    def close(self) -> None:
        """Abort all that is open. Safe to call again."""
        for index in list(self._open.values()):
            self.abort(index)

    def deliver(self, output: SequenceOutput) -> bool:
        """Take an output from the client; True when it was the request's last."""
        index = self._open[output.request_id]
        if output.finish_reason in ("error", "abort"):
            code = output.error_code or "aborted"
            words = output.error or "the engine ended this request"
            status = 500 if output.finish_reason == "error" else 503
            self.fail(output.request_id, CoreReported(words, code=code, status=status))
            return True
        self._arrivals.put_nowait((index, output))
        if output.finish_reason is None:
            return False
        del self._open[output.request_id]
        return True

    def fail(self, request_id: str, error: EngineError) -> None:
        """Take the end of one request."""
        index = self._open.pop(request_id)
        self._arrivals.put_nowait((index, error))

    async def _next_arrival(self, timeout_s: float | None) -> Arrival | None:
        try:
            return self._arrivals.get_nowait()
        except asyncio.QueueEmpty:
            pass
        try:
            async with asyncio.timeout(timeout_s):
                return await self._arrivals.get()
        except TimeoutError:
            return None
