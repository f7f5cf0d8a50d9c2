"""One request to one worker: choose, load, send; and once more elsewhere before the first byte."""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    WorkerBroken,
    WorkerRefused,
    WorkerUnavailable,
)
from gateway.metrics import GatewayMetrics
from gateway.model_names import Target
from gateway.sse import EventCutter, EventTooLong, is_comment
from gateway.tenancy.tenants import Tenant
from gateway.workers.client import (
    WorkerAnswer,
    WorkerCallFailed,
    WorkerSilent,
    WorkerStream,
    WorkerUnreachable,
)
from gateway.workers.drivers.base import WorkerDriver, WorkerRequest
from gateway.workers.placement import WorkerView
from gateway.workers.pool import WorkerPool
from gateway.workers.refusals import as_refusal, is_unknown_adapter

logger = logging.getLogger(__name__)

# Refusals that another worker may not share.
RETRIED_STATUSES = frozenset({429, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is sent to a worker for one request of a client."""

    path: str
    body: bytes
    target: Target
    tenant: Tenant
    streams: bool
    loads_adapter: bool = True
    method: str = "POST"

    def as_worker_sees_it(self) -> WorkerRequest:
        return WorkerRequest(
            method=self.method,
            path=self.path,
            body=self.body,
            public_model=self.target.public_name,
            tenant=self.tenant,
        )


@dataclass(slots=True, kw_only=True)
class Answer:
    """A worker's good answer: whole, or a stream whose first events have come."""

    worker: WorkerView
    whole: WorkerAnswer | None = None
    stream: WorkerStream | None = None
    first_events: list[bytes] = field(default_factory=list)
    cutter: EventCutter = field(default_factory=EventCutter)

    async def next_events(self) -> list[bytes] | None:
        """Return the events that have come, one or several at once, or None after the last.

        Raises WorkerCallFailed or EventTooLong where the stream breaks.
        """
        assert self.stream is not None
        events, self.first_events = self.first_events, []
        while not events:
            piece = await self.stream.next_piece()
            if piece is None:
                return None
            events = self.cutter.feed(piece)
        return events


class Dispatcher:
    """Sends requests to workers. Holds nothing of its own between requests."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        drivers: Mapping[str, WorkerDriver],
        metrics: GatewayMetrics,
        worker_wait_s: float,
    ) -> None:
        self._pool = pool
        self._drivers = drivers
        self._metrics = metrics
        self._worker_wait_s = worker_wait_s

    @asynccontextmanager
    async def answered(self, call: Call) -> AsyncIterator[Answer]:
        """Hold a worker's answer to `call`, and close it however the block is left.

        A failure before the first byte is tried once on another worker. If there is none, a broken
        connection is tried once more with the same one, as soon as it isn't suspect any more: one
        short breath of a busy machine is no reason to fail. Raises GatewayError otherwise.
        Cancelling closes the connection to the worker.
        """
        async with AsyncExitStack() as held:
            yield await self._first_good(call, held)

    async def _first_good(self, call: Call, held: AsyncExitStack) -> Answer:
        worker = await self._choose(call, excluded=(), wait_s=self._worker_wait_s)
        if worker is None:
            raise WorkerUnavailable(f"no worker serves {call.target.base_id!r} now")
        try:
            return await self._attempt(worker, call, held)
        except (WorkerUnreachable, WorkerRefused) as error:
            if isinstance(error, WorkerRefused) and error.status not in RETRIED_STATUSES:
                raise
            first_error = error
        other = await self._choose_again(call, worker, first_error)
        if other is None:
            raise _seen_by_client(first_error)
        is_refused = isinstance(first_error, WorkerRefused)
        self._metrics.retries.labels("refused" if is_refused else "unreachable").inc()
        try:
            return await self._attempt(other, call, held)
        except WorkerUnreachable as error:
            raise _seen_by_client(error) from error

    async def _choose_again(
        self, call: Call, first: WorkerView, error: WorkerUnreachable | WorkerRefused
    ) -> WorkerView | None:
        other = await self._choose(call, excluded=(first.worker_id,), wait_s=0.0)
        if other is not None and not other.is_suspect:
            return other
        if isinstance(error, WorkerRefused):
            return None
        return await self._choose(call, excluded=(), wait_s=self._worker_wait_s)

    async def _choose(
        self, call: Call, *, excluded: tuple[str, ...], wait_s: float
    ) -> WorkerView | None:
        return await self._pool.choose(
            base_id=call.target.base_id,
            lora_id=call.target.lora_id,
            excluded=excluded,
            wait_s=wait_s,
        )

    async def _attempt(self, worker: WorkerView, call: Call, held: AsyncExitStack) -> Answer:
        """Return the answer of `worker`; what it needs is added to `held` only if it is good."""
        async with AsyncExitStack() as mine:
            mine.enter_context(self._pool.sending(worker.worker_id))
            mine.enter_context(self._metrics.in_flight.track_inprogress())
            try:
                stream = await self._open(worker, call)
                mine.push_async_callback(stream.aclose)
                answer = await _begin(worker, stream, streams=call.streams)
            except WorkerSilent as error:
                raise DeadlineExceeded("the worker sent nothing for too long") from error
            except WorkerUnreachable as error:
                logger.warning("worker %s can't be reached: %s", worker.worker_id, error)
                self._pool.suspect(worker.worker_id)
                raise
            held.push_async_exit(mine.pop_all())
            return answer

    async def _open(self, worker: WorkerView, call: Call) -> WorkerStream:
        """Return a stream with status 200, loading the version first; once more if forgotten."""
        driver = self._drivers.get(worker.kind)
        if driver is None:
            raise WorkerBroken(f"this gateway can't drive workers of kind {worker.kind!r}")
        lora_id, digest = call.target.lora_id, call.target.digest
        for _ in range(2):
            if call.loads_adapter and lora_id is not None and digest is not None:
                await driver.ensure_loaded(worker, lora_id=lora_id, digest=digest)
            stream = await driver.open(worker, call.as_worker_sees_it())
            if stream.status == 200:
                return stream
            refusal = await stream.read()
            if lora_id is None or not is_unknown_adapter(refusal):
                raise as_refusal(refusal)
            driver.forget_loaded(worker, lora_id=lora_id)
        raise WorkerUnavailable("the worker has forgotten the adapter as soon as it was loaded")


async def _begin(worker: WorkerView, stream: WorkerStream, *, streams: bool) -> Answer:
    """Read up to what the client's first byte needs: the first event, or the whole body."""
    if not streams:
        return Answer(worker=worker, whole=await stream.read())
    answer = Answer(worker=worker, stream=stream)
    try:
        while (piece := await stream.next_piece()) is not None:
            events = answer.cutter.feed(piece)
            answer.first_events += events
            if any(not is_comment(event) for event in events):
                return answer
    except EventTooLong as error:
        raise WorkerBroken("the worker's stream isn't made of events") from error
    raise WorkerUnreachable("the stream ended before its first event")


def _seen_by_client(error: WorkerCallFailed | WorkerRefused) -> GatewayError:
    if isinstance(error, WorkerRefused):
        return error
    return WorkerUnavailable("the worker can't be reached; it may be starting again")
