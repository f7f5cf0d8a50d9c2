"""Decides what each step computes, who starts, who waits, and who has ended."""

from collections.abc import Mapping

from engine.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    Overloaded,
    UnknownAdapter,
)
from engine.kvcache.cache_manager import CacheManager
from engine.lora.residency import AdapterResidency
from engine.protocol import SequenceOutput
from engine.scheduler.counters import SchedulerCounters
from engine.scheduler.fcfs_queue import FcfsQueue
from engine.scheduler.holds import AdapterHolds
from engine.scheduler.plan import PlanBuilder, SampledToken, StepPlan
from engine.scheduler.stop import find_finish_reason
from engine.sequence import FinishReason, Sequence, SequenceStatus

OVERLOAD_RETRY_AFTER_S = 1.0


class Scheduler:
    """One rule: a step gives each sequence min(missing tokens, what is left of the budget).

    Running sequences first, in the order of their start, then waiting ones as FcfsQueue orders
    them. A sequence starts with blocks for all of its tokens, and only if a watermark beside them
    is free; it grows by a block at a time. When there is none, the running sequence that started
    last is preempted: it waits at the front of the queue, without blocks, and computes its tokens
    again later. It keeps its tokens and its lease.

    From this follows: only the last running sequence can be in the middle of its prompt; every
    running sequence is in every step; the one that has run longest is never preempted; nobody
    starts in a step that preempts, since the first in the queue has just lost what it would need.

    The only writer of sequences, but for their block tables. One thread; a plan that is never
    committed is forgotten by the next plan_step.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_tokens_per_step: int,
        max_model_len: int,
        cache: CacheManager,
        residency: AdapterResidency | None = None,
        max_waiting_seqs: int = 1024,
        max_overtakes: int = 128,
    ) -> None:
        self.cache = cache
        self.counters = SchedulerCounters()
        self._max_num_seqs = max_num_seqs
        self._max_tokens_per_step = max_tokens_per_step
        self._max_model_len = max_model_len
        self._max_waiting_seqs = max_waiting_seqs
        self._holds = AdapterHolds(residency)
        self._sequences: dict[str, Sequence] = {}
        self._waiting = FcfsQueue(max_overtakes=max_overtakes)
        self._running: list[Sequence] = []
        self._plan: StepPlan | None = None
        self._leaving: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended, or has not given back what it held."""
        return bool(self._sequences or self._leaving)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none yet, or none any more."""
        return len(self._waiting)

    @property
    def running_lora_ids(self) -> list[str]:
        """Adapters of running sequences, each once, sorted."""
        return sorted({seq.lora_id for seq in self._running if seq.lora_id is not None})

    @property
    def waiting_lora_ids(self) -> list[str]:
        """Adapters of waiting sequences, each once, sorted."""
        return sorted({seq.lora_id for seq in self._waiting if seq.lora_id is not None})

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises an EngineError, and changes nothing, if it can't be run."""
        self._check(seq)
        self._sequences[seq.request_id] = seq
        self._waiting.push(seq)
        if not self._waiting.is_closed:
            self._holds.claim(seq)

    def abort(self, request_id: str) -> bool:
        """End a sequence without an output; False if there is none of that id.

        Its blocks and lease are free at once, or, if a step that computes it is under way, when
        that step is committed: until then its K and V may still be written.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        self._end(seq, FinishReason.ABORT)
        return True

    def fail_waiting(self, lora_id: str) -> list[Sequence]:
        """End and return the adapter's sequences that have not started.

        To be called before the next plan_step whenever the version begins to drain, for an unload
        or since its load failed: a sequence of a version that is gone can't be planned.
        """
        return self._end_all([s for s in self._waiting if not self._holds.has_lease(s)], lora_id)

    def abort_running(self, lora_id: str) -> list[Sequence]:
        """End and return the adapter's sequences that have started, preempted ones too."""
        preempted = [seq for seq in self._waiting if self._holds.has_lease(seq)]
        return self._end_all([*self._running, *preempted], lora_id)

    def plan_step(self) -> StepPlan | None:
        """Decide what to compute next; None if nothing can be computed now."""
        self._close_plan()
        builder = PlanBuilder(self._max_tokens_per_step)
        self._plan_running(builder)
        self._start_waiting(builder)
        self._settle_claims()
        plan = builder.build()
        if not plan.chunks:
            return None
        self._plan = plan
        return plan

    def commit(self, plan: StepPlan, sampled: Mapping[int, SampledToken]) -> list[SequenceOutput]:
        """Take what the last plan has brought; end the sequences that are complete.

        `sampled` has a token for each position in plan.chunks whose chunk samples. Sequences
        aborted since the plan was made get no output.
        """
        assert plan is self._plan, "only the last plan can be committed, and only once"
        self._close_plan()
        outputs = []
        for position, chunk in enumerate(plan.chunks):
            seq = chunk.sequence
            if seq.status is SequenceStatus.FINISHED:
                continue
            seq.num_computed_tokens += chunk.num_tokens
            if chunk.samples:
                outputs.append(self._take(seq, sampled[position]))
        self.counters.count_step(plan)
        return outputs

    def check_invariants(self) -> None:
        """Check that every sequence is in one place and holds what its status says, no more."""
        self.cache.check_invariants()
        waiting, running = list(self._waiting), self._running
        assert set(self._sequences.values()) == {*waiting, *running}
        assert len(self._sequences) == len(waiting) + len(running) <= self._limit_of_sequences
        assert len(running) <= min(self._max_num_seqs, self._max_tokens_per_step)
        for seq in waiting:
            assert seq.status is SequenceStatus.WAITING
            assert seq.num_computed_tokens == 0
            assert not seq.block_table
        for seq in running:
            assert seq.status is SequenceStatus.RUNNING
            assert seq.num_missing_tokens > 0
            num_slots = len(seq.block_table) * self.cache.block_size
            assert seq.num_computed_tokens <= num_slots
        for seq in self._leaving:
            assert seq.status is SequenceStatus.FINISHED
        self._holds.check_invariants(waiting=waiting, started=[*running, *self._leaving])

    @property
    def _limit_of_sequences(self) -> int:
        # A preempted sequence may wait although the queue is full.
        return self._max_waiting_seqs + self._max_num_seqs

    def _check(self, seq: Sequence) -> None:
        assert seq.status is SequenceStatus.WAITING
        if seq.request_id in self._sequences:
            raise InvalidRequest(f"request {seq.request_id!r} exists already", param="request_id")
        if seq.num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if seq.params.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
        if seq.num_prompt_tokens >= self._max_model_len:
            raise ContextLengthExceeded(
                num_prompt_tokens=seq.num_prompt_tokens,
                max_tokens=seq.params.max_tokens,
                max_model_len=self._max_model_len,
            )
        self._check_fits(seq)
        if seq.lora_id is not None and not self._holds.knows(seq.lora_id):
            raise UnknownAdapter(f"no adapter {seq.lora_id!r} is loaded here")
        if len(self._waiting) >= self._max_waiting_seqs:
            raise Overloaded(
                f"{len(self._waiting)} requests are queued already",
                retry_after_s=OVERLOAD_RETRY_AFTER_S,
            )

    def _check_fits(self, seq: Sequence) -> None:
        # The last token is only sampled: its K and V are never needed.
        num_tokens = min(seq.num_prompt_tokens + seq.params.max_tokens, self._max_model_len) - 1
        if not self.cache.can_ever_hold(num_tokens):
            capacity = self.cache.pool.num_blocks * self.cache.block_size
            raise InvalidRequest(
                f"prompt and answer may need {num_tokens} tokens of KV cache, "
                f"but this worker has room for {capacity} in all",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _plan_running(self, builder: PlanBuilder) -> None:
        for seq in tuple(self._running):
            if seq.status is SequenceStatus.RUNNING and self._grow(seq):
                builder.add(seq, self._holds.lora_index(seq))

    def _grow(self, seq: Sequence) -> bool:
        """Make room for all tokens of `seq`; False if it had to be preempted itself.

        A victim is never in the plan already: it started after `seq`, so its turn is later.
        """
        while not self.cache.extend(seq, seq.num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.cache.release(seq)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        self._waiting.push_front(seq)
        self.counters.num_preemptions += 1

    def _start_waiting(self, builder: PlanBuilder) -> None:
        for seq in self._waiting.candidates():
            if builder.num_tokens_left == 0 or len(self._running) >= self._max_num_seqs:
                return
            if not self._holds.can_start(seq):
                continue
            if not self.cache.can_admit(seq.num_tokens):
                self._holds.undo_start(seq)
                return
            self._start(seq)
            builder.add(seq, self._holds.lora_index(seq))

    def _start(self, seq: Sequence) -> None:
        has_room = self.cache.extend(seq, seq.num_tokens)
        assert has_room, "can_admit promised room"
        self._holds.unclaim(seq)
        self._waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        self._running.append(seq)

    def _settle_claims(self) -> None:
        held_back = self._waiting.held_back()
        for seq in self._waiting:
            if seq in held_back:
                self._holds.unclaim(seq)
            else:
                self._holds.claim(seq)

    def _take(self, seq: Sequence, sampled: SampledToken) -> SequenceOutput:
        """Append what was drawn for `seq`, and end it if that completes it."""
        if sampled.token_id is None:
            self._end(seq, FinishReason.ERROR)
            return SequenceOutput(
                request_id=seq.request_id,
                token_ids=[],
                finish_reason=FinishReason.ERROR.value,
                num_cached_tokens=seq.num_cached_tokens,
                error_code="logits_not_finite",
                error="the model's output for this request is not a number",
            )
        seq.token_ids.append(sampled.token_id)
        self.counters.num_tokens_generated += 1
        reason = find_finish_reason(seq, max_model_len=self._max_model_len)
        if reason is not None:
            self._end(seq, reason)
        return SequenceOutput(
            request_id=seq.request_id,
            token_ids=[sampled.token_id],
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            finish_reason=None if reason is None else reason.value,
            stop_token_id=sampled.token_id if reason is FinishReason.STOP else None,
            num_cached_tokens=seq.num_cached_tokens,
        )

    def _end_all(self, candidates: list[Sequence], lora_id: str) -> list[Sequence]:
        ended = [seq for seq in candidates if seq.lora_id == lora_id]
        for seq in ended:
            self._end(seq, FinishReason.ABORT)
        return ended

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """End `seq`, whatever it was doing: the only way out of the scheduler."""
        del self._sequences[seq.request_id]
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        if self._plan is not None and self._plan.has(seq):
            self._leaving.append(seq)
        else:
            self._give_back(seq)

    def _close_plan(self) -> None:
        self._plan = None
        for seq in self._leaving:
            self._give_back(seq)
        self._leaving.clear()

    def _give_back(self, seq: Sequence) -> None:
        """Return the blocks and the hold of an ended sequence: the only place."""
        self.cache.release(seq)
        self._holds.drop(seq)
