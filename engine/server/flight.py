"""What one HTTP request has running in the core."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from engine.errors import EngineError
from engine.protocol import SequenceOutput
from engine.server.errors import CoreReported

Arrival = tuple[int, SequenceOutput | EngineError]


class Flight:
    """The core requests of one HTTP request, each of one or more samples, sharing one queue.

    Whoever got it closes it. `close` never waits, so that it works in a task that is being
    cancelled.

    `_running` has the requests that the core hasn't ended, with the samples it hasn't ended;
    `_wanted` has, for each request by its number, the samples that the client still reads.
    """

    def __init__(self, num_samples: Mapping[str, int], *, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._numbers = {request_id: i for i, request_id in enumerate(num_samples)}
        self._running = {request_id: set(range(n)) for request_id, n in num_samples.items()}
        self._wanted = [set(range(n)) for n in num_samples.values()]
        self._arrivals: deque[Arrival] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def expects(self, request_id: str) -> bool:
        """Tell whether this request may still bring something."""
        return request_id in self._running

    @property
    def has_output(self) -> bool:
        """Tell whether `next_output` would return one at once."""
        if not self._arrivals:
            return False
        number, what = self._arrivals[0]
        return not isinstance(what, EngineError) and what.sample_index in self._wanted[number]

    async def next_output(
        self, timeout_s: float | None = None
    ) -> tuple[int, SequenceOutput] | None:
        """Wait for the next output, or return None after `timeout_s`.

        The number says which of the added requests it belongs to. Raises what failed a request;
        the others are aborted by `close`.
        """
        while True:
            if not self._arrivals:
                await self._wait(timeout_s)
                if not self._arrivals:
                    return None
            number, what = self._arrivals.popleft()
            if isinstance(what, EngineError):
                if self._wanted[number]:
                    raise what
            elif what.sample_index in self._wanted[number]:
                return number, what

    def finish(self, number: int, sample_index: int) -> None:
        """Nothing more of this sample is read; the core forgets a request that nobody reads."""
        self._wanted[number].discard(sample_index)
        if not self._wanted[number]:
            self._abort(number)

    def close(self) -> None:
        """Abort all that is open. Safe to call again."""
        for number, wanted in enumerate(self._wanted):
            wanted.clear()
            self._abort(number)

    def deliver(self, output: SequenceOutput) -> bool:
        """Take an output from the client; True when it was the request's last."""
        request_id = output.request_id
        if output.finish_reason in ("error", "abort"):
            code = output.error_code or "aborted"
            words = output.error or "the engine ended this request"
            status = 500 if output.finish_reason == "error" else 503
            has_siblings = len(self._running[request_id]) > 1
            self.fail(request_id, CoreReported(words, code=code, status=status))
            if has_siblings:
                self._forget(request_id)
            return True
        self._arrive(request_id, output)
        running = self._running[request_id]
        if output.finish_reason is not None:
            running.discard(output.sample_index)
        if running:
            return False
        del self._running[request_id]
        return True

    def fail(self, request_id: str, error: EngineError) -> None:
        """Take the end of one request with all its samples."""
        del self._running[request_id]
        self._arrive(request_id, error)

    def _abort(self, number: int) -> None:
        for request_id, known in self._numbers.items():
            if known == number and self._running.pop(request_id, None) is not None:
                self._forget(request_id)

    def _arrive(self, request_id: str, what: SequenceOutput | EngineError) -> None:
        self._arrivals.append((self._numbers[request_id], what))
        self._wake()

    async def _wait(self, timeout_s: float | None) -> None:
        """Return when something arrives, or after `timeout_s`. A timer alone costs little."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
