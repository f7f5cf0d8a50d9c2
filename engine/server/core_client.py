"""One engine core as the server sees it: commands out, events in, one queue per HTTP request."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from engine.errors import CoreBroken, EngineError, Overloaded
from engine.protocol import (
    AbortRequest,
    AddRequest,
    CallDone,
    CallFailed,
    Command,
    CoreFailed,
    CoreProgress,
    CoreReady,
    CoreStatus,
    Event,
    GetStatus,
    LoadAdapter,
    ProbeAdapter,
    ProbeResult,
    RequestFailed,
    SequenceOutput,
    StepDone,
    UnloadAdapter,
)
from engine.server.backlog import Backlog
from engine.server.errors import CoreReported
from engine.server.flight import Flight
from engine.server.identifiers import new_id

logger = logging.getLogger(__name__)

Call = LoadAdapter | UnloadAdapter | ProbeAdapter | GetStatus

# About the prompts and answers of a thousand chats: more would wait for minutes, if not hours.
MAX_WAITING_TOKENS = 512 * 1024
_LAST_WORDS_S = 0.1


class CoreStartFailed(Exception):
    """The core can't start; `code` and the message are meant for the operator."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class CoreClient:
    """Speaks engine.protocol with one core process. Binds both sockets; the core connects.

    Commands are sent without waiting, so an abort always goes out. When the core is gone,
    everything that waits for it is failed with CoreBroken, and so is everything that comes later.
    """

    def __init__(self, *, commands: str, events: str, on_progress: Callable[[str], None]) -> None:
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._push.setsockopt(zmq.SNDHWM, 0)
        self._push.bind(commands)
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, 0)
        self._pull.bind(events)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._on_progress = on_progress
        self._backlog = Backlog(clock=time.monotonic)
        self._flights: dict[str, Flight] = {}
        self._calls: dict[str, asyncio.Future[CallDone]] = {}
        self._broken: CoreBroken | None = None
        self.started: asyncio.Future[CoreReady] = asyncio.get_running_loop().create_future()

    @property
    def num_in_flight(self) -> int:
        """Core requests without an end so far."""
        return len(self._flights)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of core requests that have not begun to answer; see Backlog."""
        return self._backlog.num_waiting_tokens

    async def read_events(self) -> None:
        """Hand out events for ever; ends only by cancellation or a message it can't read."""
        # zmq's own asyncio sockets do the same, at a tenth of a millisecond for each message.
        loop, may_have_more = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pull.FD, may_have_more.set)
        try:
            while True:
                may_have_more.clear()
                self._hand_out()
                await may_have_more.wait()
        finally:
            loop.remove_reader(self._pull.FD)

    async def read_last_words(self) -> None:
        """Hand out what a core that has ended had still written."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.read_events()

    def submit(self, requests: Sequence[AddRequest]) -> Flight:
        """Start core requests; the caller closes the flight.

        Raises Overloaded when MAX_WAITING_TOKENS are queued already: what is added to the queue
        is no more than one HTTP request can hold.
        """
        if self.num_waiting_tokens >= MAX_WAITING_TOKENS:
            raise Overloaded(
                f"{self.num_waiting_tokens} tokens are queued already",
                retry_after_s=self._backlog.wait_s(),
            )
        num_samples = {request.request_id: request.params.n for request in requests}
        flight = Flight(num_samples, forget=self.forget)
        try:
            for request in requests:
                self._send(request)
                self._flights[request.request_id] = flight
                self._backlog.add(request)
        except CoreBroken:
            flight.close()
            raise
        return flight

    def forget(self, request_id: str) -> None:
        """Abort one request; later events about it are dropped."""
        self._backlog.end(request_id)
        if self._flights.pop(request_id, None) is None or self._broken is not None:
            return
        try:
            self._send(AbortRequest(request_id=request_id))
        except CoreBroken:
            logger.debug("abort of a request whose core has ended")

    async def load_adapter(self, lora_id: str, path: str) -> None:
        """Make a version known to the core; raises what the core answers."""
        await self._call(LoadAdapter(call_id=new_id(), lora_id=lora_id, path=path))

    async def unload_adapter(self, lora_id: str, *, timeout_s: float = 30.0) -> None:
        """Make the core forget a version; running requests get `timeout_s`."""
        call = UnloadAdapter(call_id=new_id(), lora_id=lora_id, timeout_s=timeout_s)
        await self._call(call)

    async def probe_adapter(self, lora_id: str, *, timeout_s: float = 30.0) -> ProbeResult:
        """Ask whether a version changes what the model says; its rows may take `timeout_s`."""
        call = ProbeAdapter(call_id=new_id(), lora_id=lora_id, timeout_s=timeout_s)
        done = await self._call(call)
        assert done.probe is not None, "ProbeAdapter is answered with a result"
        return done.probe

    async def status(self) -> CoreStatus:
        """Ask the core for its counters and gauges."""
        done = await self._call(GetStatus(call_id=new_id()))
        assert done.status is not None, "GetStatus is answered with a status"
        return done.status

    def break_off(self, error: CoreBroken) -> None:
        """Fail everything that waits, because the core has ended."""
        self._broken = error
        for request_id, flight in list(self._flights.items()):
            flight.fail(request_id, CoreBroken(*error.args))
            self._backlog.end(request_id)
        self._flights.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(CoreBroken(*error.args))
        self._calls.clear()

    def close(self) -> None:
        """Close both sockets without waiting for unsent commands."""
        self.started.cancel()
        self._push.close(linger=0)
        self._pull.close(linger=0)
        self._context.term()

    def check_invariants(self) -> None:
        """Every flight we route to is open for that request, and counted."""
        for request_id, flight in self._flights.items():
            assert flight.expects(request_id)
        self._backlog.check_invariants()
        assert self._backlog.request_ids == self._flights.keys()

    def _hand_out(self) -> None:
        """Hand out events until zmq has no more; only then does its descriptor tell of new ones."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._dispatch(self._decoder.decode(self._pull.recv(zmq.NOBLOCK)))

    def _send(self, command: Command) -> None:
        if self._broken is not None:
            raise CoreBroken(*self._broken.args)
        try:
            self._push.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:
            raise CoreBroken("the engine core is not connected") from None

    async def _call(self, call: Call) -> CallDone:
        future: asyncio.Future[CallDone] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = future
        try:
            self._send(call)
            return await future
        finally:
            self._calls.pop(call.call_id, None)

    def _dispatch(self, event: Event) -> None:
        match event:
            case StepDone():
                for output in event.outputs:
                    self._deliver(output)
            case RequestFailed():
                flight = self._flights.pop(event.request_id, None)
                self._backlog.end(event.request_id)
                if flight is not None:
                    flight.fail(event.request_id, self._reported(event))
            case CallDone() | CallFailed():
                self._settle(event)
            case CoreProgress():
                self._on_progress(event.text)
            case CoreReady() | CoreFailed():
                self._settle_start(event)

    def _settle_start(self, event: CoreReady | CoreFailed) -> None:
        if self.started.done():
            return
        if isinstance(event, CoreReady):
            self.started.set_result(event)
        else:
            self.started.set_exception(CoreStartFailed(event.message, code=event.code))

    def _deliver(self, output: SequenceOutput) -> None:
        flight = self._flights.get(output.request_id)
        self._backlog.bring(output)
        if flight is not None and flight.deliver(output):
            self._flights.pop(output.request_id, None)
            self._backlog.end(output.request_id)

    def _settle(self, event: CallDone | CallFailed) -> None:
        future = self._calls.get(event.call_id)
        if future is None or future.done():
            return
        if isinstance(event, CallDone):
            future.set_result(event)
        else:
            future.set_exception(self._reported(event))

    def _reported(self, event: RequestFailed | CallFailed) -> EngineError:
        """Return what the core refuses; when to try again is what the server can say."""
        if event.status == Overloaded.status:
            return Overloaded(event.message, retry_after_s=self._backlog.wait_s())
        problems = event.problems if isinstance(event, CallFailed) else ()
        return CoreReported(event.message, code=event.code, status=event.status, problems=problems)
