"""The engine core: commands in, one step at a time, events out. Synchronous, one thread."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import AdapterConflict, EngineError, InvalidRequest, UnknownAdapter
from engine.kvcache.prefix_index import kv_root
from engine.lora.lifecycle import AdapterLifecycle, call_failed
from engine.model.probing import AdapterProber
from engine.model.runner import ModelRunner, PromptTile
from engine.protocol import (
    AbortRequest,
    AddRequest,
    CallDone,
    Command,
    CoreStatus,
    Event,
    GetStatus,
    LoadAdapter,
    ProbeAdapter,
    RequestFailed,
    SequenceOutput,
    StepDone,
    UnloadAdapter,
)
from engine.sampling.prompt_logprobs import PromptLogprobs
from engine.sampling.sampler import SampledToken, SamplingRow, sample
from engine.scheduler.plan import StepPlan
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a request may ask of the loaded model, and which model it is."""

    base_identity: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    """An unload that waits for leases to end; at `deadline_s` (the core's clock) it ends them."""

    call_id: str
    lora_id: str
    deadline_s: float


class EngineCore:
    """Joins scheduler, adapters and runner.

    Only this class tells the scheduler to end an adapter's sequences, and only it turns errors
    into events. The owner calls handle() and step() from one thread and sends what they return.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        adapters: AdapterLifecycle | None,
        limits: ModelLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.adapters = adapters
        self.limits = limits
        self._clock = clock
        self._unloads: list[Unload] = []
        # Of versions whose images are being built: nothing to drain yet.
        self._unloads_to_begin: list[Unload] = []
        self._prober: AdapterProber | None = None
        if adapters is not None:
            self._prober = AdapterProber(
                residency=adapters.residency,
                runner=runner,
                max_model_len=limits.max_model_len,
                clock=clock,
            )
        self._checked = True

    @property
    def has_work(self) -> bool:
        """Whether a step now would bring anything on."""
        loads = self.adapters is not None and self.adapters.is_busy
        probes = self._prober is not None and self._prober.is_busy
        return self.scheduler.has_work or loads or probes or bool(self._unloads)

    @property
    def is_waiting_for_files(self) -> bool:
        """Whether all that is left to do is another process's job."""
        return (
            not self.scheduler.has_work
            and self.adapters is not None
            and not self.adapters.is_copying
        )

    def handle(self, command: Command) -> list[Event]:
        """Take one command; return its answers, if there are any already."""
        match command:
            case AddRequest():
                return self._add(command)
            case AbortRequest():
                self.scheduler.abort(command.request_id)
                return []
            case LoadAdapter():
                return self._load(command)
            case UnloadAdapter():
                return self._unload(command)
            case ProbeAdapter():
                return self._probe(command)
            case GetStatus():
                return [CallDone(call_id=command.call_id, status=self.status())]

    def step(self) -> list[Event]:
        """Bring loads and unloads on, then compute one mixed batch if there is one."""
        events: list[Event] = []
        if self.adapters is not None:
            events += self.adapters.advance()
            events += self._fail_broken_loads(self.adapters)
            events += self._begin_late_unloads(self.adapters)
            events += self._advance_unloads(self.adapters)
        if self._prober is not None:
            events += self._prober.advance()
        plan = self.scheduler.plan_step()
        if plan is None:
            self._check_when_idle()
            return events
        self._checked = False
        outputs = self._compute(plan)
        if outputs:
            events.append(StepDone(outputs=outputs))
        return events

    def status(self) -> CoreStatus:
        """Return counters since start and gauges of now."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        residency = None if self.adapters is None else self.adapters.residency
        return CoreStatus(
            num_steps=counters.num_steps,
            num_tokens_computed=counters.num_tokens_computed,
            num_tokens_generated=counters.num_tokens_generated,
            num_steps_with_several_adapters=counters.num_steps_with_several_adapters,
            num_steps_with_several_chunks=counters.num_steps_with_several_chunks,
            max_adapters_in_step=counters.max_adapters_in_step,
            num_running_seqs=scheduler.num_running,
            num_waiting_seqs=scheduler.num_waiting,
            num_blocks=scheduler.cache.pool.num_blocks,
            num_free_blocks=scheduler.cache.pool.num_free_blocks,
            lora_rows={} if residency is None else residency.num_rows,
            free_lora_rows={} if residency is None else residency.num_free_rows,
            running_lora_ids=scheduler.running_lora_ids,
            waiting_lora_ids=scheduler.waiting_lora_ids,
            adapters=[] if residency is None else residency.statuses(),
            num_adapter_loads=0 if residency is None else residency.num_loads,
            num_adapter_evictions=0 if residency is None else residency.num_evictions,
            num_preemptions=counters.num_preemptions,
            num_cached_tokens=counters.num_cached_tokens,
            num_cached_blocks=scheduler.cache.num_cached_blocks,
        )

    def check_invariants(self) -> None:
        """Check that nothing has leaked: blocks, rows, leases and claims all add up."""
        self.scheduler.check_invariants()
        if self.adapters is not None:
            self.adapters.check_invariants()

    def close(self) -> None:
        """End the loader process; the core can't be used afterwards."""
        if self.adapters is not None:
            self.adapters.close()

    def _compute(self, plan: StepPlan) -> list[SequenceOutput]:
        """Run a step and draw its tokens; return what it brought."""
        prompt_logprobs = PromptLogprobs()

        def take_prompt_logits(tile: PromptTile) -> None:
            sequence = plan.chunks[tile.position].sequence
            first = tile.start + 1
            prompt_logprobs.add(
                tile.position,
                tile.logits,
                next_token_ids=sequence.token_ids[first : first + tile.logits.shape[0]],
                num_top=sequence.params.num_prompt_logprobs or 0,
            )

        logits = self.runner.run(plan, on_prompt_logits=take_prompt_logits)
        sampled: list[SampledToken] = []
        if logits is not None:
            sampled = sample(logits, _sampling_rows(plan))
        return self.scheduler.commit(plan, sampled, prompt_logprobs.by_position())

    def _add(self, request: AddRequest) -> list[Event]:
        try:
            self._check_request(request)
            self.scheduler.add(self._sequence_of(request))
        except EngineError as error:
            return [_failed(request.request_id, error)]
        return []

    def _check_request(self, request: AddRequest) -> None:
        num_prompt_tokens = len(request.prompt_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if num_prompt_tokens + request.params.max_tokens > self.limits.max_model_len:
            raise InvalidRequest(
                f"this model's context is {self.limits.max_model_len} tokens, but the prompt has "
                f"{num_prompt_tokens} and {request.params.max_tokens} more were asked for",
                param="prompt",
                code="context_length_exceeded",
            )
        if not all(0 <= token < self.limits.vocab_size for token in request.prompt_ids):
            raise InvalidRequest(
                f"token ids are between 0 and {self.limits.vocab_size - 1}", param="prompt"
            )
        if request.lora_id is not None and (
            self.adapters is None or not self.adapters.residency.knows(request.lora_id)
        ):
            raise UnknownAdapter(f"no adapter {request.lora_id!r} is loaded here")

    def _sequence_of(self, request: AddRequest) -> Sequence:
        seed = request.params.seed
        return Sequence(
            request_id=request.request_id,
            token_ids=list(request.prompt_ids),
            num_prompt_tokens=len(request.prompt_ids),
            params=request.params,
            seed=secrets.randbits(63) if seed is None else seed,
            eos_token_ids=self.limits.eos_token_ids,
            lora_id=request.lora_id,
            tenant=request.tenant,
            priority=request.priority,
            cache_root=self._cache_root(request),
        )

    def _cache_root(self, request: AddRequest) -> bytes:
        version = None
        if request.lora_id is not None:
            assert self.adapters is not None, "its adapter is known"
            version = self.adapters.residency.content_digest(request.lora_id)
        return kv_root(
            base_identity=self.limits.base_identity, version=version, salt=request.cache_salt
        )

    def _load(self, command: LoadAdapter) -> list[Event]:
        if self.adapters is None:
            error = InvalidRequest("this worker was started without LoRA", code="lora_disabled")
            return [call_failed(command.call_id, error)]
        return self.adapters.load(command)

    def _probe(self, command: ProbeAdapter) -> list[Event]:
        if self._prober is None:
            error = InvalidRequest("this worker was started without LoRA", code="lora_disabled")
            return [call_failed(command.call_id, error)]
        return self._prober.begin(command)

    def _unload(self, command: UnloadAdapter) -> list[Event]:
        adapters, lora_id = self.adapters, command.lora_id
        is_known = adapters is not None and adapters.residency.knows(lora_id)
        if adapters is None or not (is_known or adapters.is_laying_out(lora_id)):
            error = UnknownAdapter(f"no adapter {lora_id!r} is loaded here")
            return [call_failed(command.call_id, error)]
        unload = Unload(
            call_id=command.call_id,
            lora_id=lora_id,
            deadline_s=self._clock() + command.timeout_s,
        )
        if not is_known:
            self._unloads_to_begin.append(unload)
            return []
        return self._begin_unload(adapters, unload)

    def _begin_unload(self, adapters: AdapterLifecycle, unload: Unload) -> list[Event]:
        unloaded = AdapterConflict(f"the adapter {unload.lora_id!r} was unloaded")
        ended = self.scheduler.fail_waiting(unload.lora_id)
        adapters.residency.unload(unload.lora_id)
        self._unloads.append(unload)
        return [_failed(request_id, unloaded) for request_id in ended]

    def _fail_broken_loads(self, adapters: AdapterLifecycle) -> list[Event]:
        events: list[Event] = []
        for lora_id, message in adapters.take_failures().items():
            error = EngineError(f"the adapter {lora_id!r} can't be loaded: {message}")
            ended = self.scheduler.fail_waiting(lora_id)
            events += [_failed(request_id, error) for request_id in ended]
            if self._prober is not None:
                events += self._prober.load_failed(lora_id, error)
        return events

    def _begin_late_unloads(self, adapters: AdapterLifecycle) -> list[Event]:
        """Begin the unloads whose versions have become known; give up on those that are late."""
        events: list[Event] = []
        for unload in list(self._unloads_to_begin):
            if not adapters.is_laying_out(unload.lora_id):
                self._unloads_to_begin.remove(unload)
                if adapters.residency.knows(unload.lora_id):
                    events += self._begin_unload(adapters, unload)
                else:
                    events.append(CallDone(call_id=unload.call_id))
            elif self._clock() >= unload.deadline_s:
                self._unloads_to_begin.remove(unload)
                error = AdapterConflict(f"the adapter {unload.lora_id!r} is still being loaded")
                events.append(call_failed(unload.call_id, error))
        return events

    def _advance_unloads(self, adapters: AdapterLifecycle) -> list[Event]:
        events: list[Event] = []
        for unload in list(self._unloads):
            if self._clock() >= unload.deadline_s:
                unloaded = AdapterConflict(f"the adapter {unload.lora_id!r} was unloaded")
                ended = self.scheduler.abort_running(unload.lora_id)
                events += [_failed(request_id, unloaded) for request_id in ended]
            if adapters.residency.finish_unload(unload.lora_id):
                adapters.forget_gone()
                self._unloads.remove(unload)
                events.append(CallDone(call_id=unload.call_id))
        return events

    def _check_when_idle(self) -> None:
        if not self._checked and not self.has_work:
            self.check_invariants()
            self._checked = True


def _sampling_rows(plan: StepPlan) -> list[SamplingRow]:
    """Return how each token of a step is drawn, in the order of the plan."""
    return [
        SamplingRow(
            params=chunk.sequence.params,
            seed=chunk.sequence.seed,
            position=chunk.sequence.num_tokens,
            sample_index=sample_index,
            token_ids=chunk.sequence.token_ids,
            num_prompt_tokens=chunk.sequence.num_prompt_tokens,
            eos_token_ids=chunk.sequence.eos_token_ids,
        )
        for chunk in plan.chunks
        for sample_index in chunk.drawn_samples
    ]


def _failed(request_id: str, error: EngineError) -> RequestFailed:
    return RequestFailed(
        request_id=request_id, code=error.code, message=str(error), status=error.status
    )
