"""The response of an inference route: a worker's bytes, with the gateway's headers."""

import logging
from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adapters.http_protocol import send_of_pieces
from gateway.dispatch import Answer, Call, Dispatcher
from gateway.errors import GatewayError
from gateway.metrics import GatewayMetrics
from gateway.presence import while_client_stays
from gateway.registry_reader import REGISTRY_HEADER
from gateway.sse import DONE, EventTooLong, error_event, is_comment, is_done, usage_of
from gateway.workers.client import WorkerCallFailed

logger = logging.getLogger(__name__)


class _WithUsage(msgspec.Struct):
    usage: dict[str, object] | None = None


class StreamBroken(GatewayError):
    """The worker's stream ended in the middle; what was sent so far stands."""

    code = "stream_broken"
    status = 502


class InferenceResponse(Response):
    """Runs `call` when it is sent, and ends it at the worker when the client leaves.

    Errors before the first byte are raised, so that they are answered like all others. After it
    they become an error event, then [DONE]. The usage event, which is always asked for, reaches
    the client only if `shows_usage`.
    """

    def __init__(
        self,
        call: Call,
        *,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        shows_usage: bool,
        from_snapshot: bool,
    ) -> None:
        super().__init__()
        self._call = call
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._shows_usage = shows_usage
        self._from_snapshot = from_snapshot
        self._started = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_client_stays(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._dispatcher.answered(self._call) as answer:
            self._metrics.ttft_seconds.observe(self._clock() - self._started)
            if answer.whole is not None:
                await self._send_whole(answer, scope, receive, send)
            else:
                await self._send_stream(answer, scope, send)

    async def _send_whole(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        assert answer.whole is not None
        body = answer.whole.body
        try:
            usage = msgspec.json.decode(body, type=_WithUsage).usage
        except msgspec.DecodeError:
            usage = None
        self._metrics.count_usage(usage or {})
        response = Response(body, media_type="application/json", headers=self._own_headers(answer))
        await response(scope, receive, send)

    async def _send_stream(self, answer: Answer, scope: Scope, send: Send) -> None:
        headers = {
            **self._own_headers(answer),
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        send = send_of_pieces(scope, send)
        counter = _StreamCounter(shows_usage=self._shows_usage)
        try:
            await self._pump(answer, counter, send)
        finally:
            counter.settle(self._metrics)
        await send({"type": "http.response.body", "body": b""})

    async def _pump(self, answer: Answer, counter: "_StreamCounter", send: Send) -> None:
        try:
            while (events := await answer.next_events()) is not None:
                shown = counter.take(events)
                if shown:
                    await send({"type": "http.response.body", "body": shown, "more_body": True})
        except (WorkerCallFailed, EventTooLong) as error:
            logger.warning("stream of worker %s broke: %s", answer.worker.worker_id, error)
        if not counter.is_done:
            self._metrics.streams_broken.inc()
            broken = StreamBroken("the worker was lost before the answer was complete")
            body = error_event(broken) + DONE
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _own_headers(self, answer: Answer) -> dict[str, str]:
        headers = {
            "x-loraplex-version": self._call.target.version,
            "x-loraplex-worker": answer.worker.worker_id,
        }
        if self._from_snapshot:
            headers[REGISTRY_HEADER] = "snapshot"
        return headers


class _StreamCounter:
    """Decides which events are shown, and what the stream is charged.

    A stream that ended early has no usage; the events that carried text are counted instead.
    """

    def __init__(self, *, shows_usage: bool) -> None:
        self.is_done = False
        self._shows_usage = shows_usage
        self._num_events = 0
        self._usage: dict[str, object] | None = None

    def take(self, events: list[bytes]) -> bytes:
        """Return the bytes of those events that the client sees."""
        shown = []
        for event in events:
            usage = usage_of(event)
            if usage is not None:
                self._usage = usage
                if not self._shows_usage:
                    continue
            elif is_done(event):
                self.is_done = True
            elif not is_comment(event):
                self._num_events += 1
            shown.append(event)
        return b"".join(shown)

    def settle(self, metrics: GatewayMetrics) -> None:
        """Count the tokens of the stream, however it ended."""
        metrics.count_usage(self._usage or {"completion_tokens": self._num_events})
