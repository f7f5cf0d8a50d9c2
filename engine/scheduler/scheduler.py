"""Decides what each step computes, who starts, who waits, and who has ended."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from itertools import islice

from engine.errors import InvalidRequest, Overloaded, UnknownAdapter
from engine.kvcache.cache_manager import CacheManager
from engine.lora.residency import AdapterResidency
from engine.protocol import SequenceOutput, TokenLogprob
from engine.scheduler.counters import SchedulerCounters
from engine.scheduler.fair_queue import FairQueue, QueuePolicy
from engine.scheduler.holds import AdapterHolds
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.outputs import error_output, token_output
from engine.scheduler.plan import PlanBuilder, SampledToken, StepPlan
from engine.scheduler.stop import find_finish_reason
from engine.sequence import FinishReason, SampleGroup, Sequence, SequenceStatus

OVERLOAD_RETRY_AFTER_S = 1.0


class Scheduler:
    """One rule: a step gives each sequence min(missing tokens, what is left of the budget).

    Running sequences first, in the order of their start, then waiting ones as FairQueue orders
    them. A sequence starts with blocks for all of its tokens, some of them found in the cache, and
    only if a watermark beside them is free; it grows by a block at a time. When there is none, the
    last of the running sequences is preempted: it waits at the front of the queue, without blocks,
    and later computes again what is no longer found. It keeps its tokens and its lease.

    A request of n samples is one sequence until its prompt is computed. Then the others fork off
    it and run beside it, or, where there is no room, wait as if they had been preempted.

    From this follows: only the last running sequence can be in the middle of its prompt; every
    running sequence is in every step; the one that has run longest is never preempted; in a step
    that preempts somebody starts only if the cache makes up for blocks that were lost.

    The only writer of sequences, but for what CacheManager owns. One thread; a plan that is never
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
        policy: QueuePolicy = QueuePolicy.FAIR,
    ) -> None:
        self.cache = cache
        self.counters = SchedulerCounters()
        self._limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=max_tokens_per_step,
            max_model_len=max_model_len,
            max_waiting_seqs=max_waiting_seqs,
        )
        self._holds = AdapterHolds(residency)
        self._requests: dict[str, SampleGroup] = {}
        self._waiting = FairQueue(policy=policy, max_overtakes=max_overtakes)
        self._running: list[Sequence] = []
        self._plan: StepPlan | None = None
        self._leaving: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or has not given back what it held."""
        return bool(self._requests or self._leaving)

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
        """Queue a new request. Raises an EngineError, and changes nothing, if it can't be run."""
        self._check(seq)
        seq.group.samples.append(seq)
        self._requests[seq.request_id] = seq.group
        self._waiting.push(seq)
        if not self._waiting.is_closed:
            self._holds.claim(seq)

    def abort(self, request_id: str) -> bool:
        """End all samples of a request without an output; False if there is none of that id.

        Their blocks and lease are free at once, or, if a step that computes them is under way,
        when that step is committed: until then their K and V may still be written.
        """
        group = self._requests.get(request_id)
        if group is None:
            return False
        self._end_all(group.samples)
        return True

    def fail_waiting(self, lora_id: str) -> list[str]:
        """End the adapter's requests that have not started, and return their ids.

        To be called before the next plan_step whenever the version begins to drain, for an unload
        or since its load failed: a sequence of a version that is gone can't be planned.
        """
        return self._end_all(
            seq
            for seq in self._waiting
            if seq.lora_id == lora_id and not self._holds.has_lease(seq)
        )

    def abort_running(self, lora_id: str) -> list[str]:
        """End the adapter's requests that have started, and return their ids."""
        preempted = [seq for seq in self._waiting if self._holds.has_lease(seq)]
        return self._end_all(seq for seq in [*self._running, *preempted] if seq.lora_id == lora_id)

    def plan_step(self) -> StepPlan | None:
        """Decide what to compute next; None if nothing can be computed now."""
        self._close_plan()
        builder = PlanBuilder(self._limits.max_tokens_per_step)
        self._plan_running(builder)
        self._start_waiting(builder)
        self._settle_claims()
        plan = builder.build(self.cache)
        if not plan.chunks:
            return None
        self._plan = plan
        return plan

    def commit(
        self,
        plan: StepPlan,
        sampled: SequenceABC[SampledToken],
        prompt_logprobs: Mapping[int, SequenceABC[list[TokenLogprob]]] | None = None,
    ) -> list[SequenceOutput]:
        """Take what the last plan has brought; end the sequences that are complete.

        sampled          a token for each of the chunks' drawn_samples, in the order of the plan
        prompt_logprobs  by position in plan.chunks, one entry for each of its num_prompt_logits
        Requests aborted since the plan was made get no output.
        """
        assert plan is self._plan, "only the last plan can be committed, and only once"
        self._close_plan()
        draws = iter(sampled)
        outputs: list[SequenceOutput] = []
        for position, chunk in enumerate(plan.chunks):
            seq = chunk.sequence
            tokens = list(islice(draws, len(chunk.drawn_samples)))
            if seq.status is SequenceStatus.FINISHED:
                continue
            if prompt_logprobs is not None:
                seq.prompt_logprobs.extend(prompt_logprobs.get(position, ()))
            seq.num_computed_tokens += chunk.num_tokens
            self.cache.mark_computed(seq)
            samples = self._fork(seq, len(tokens)) if tokens else ()
            outputs += [
                self._take(sample, token) for sample, token in zip(samples, tokens, strict=True)
            ]
        assert next(draws, None) is None, "every token is somebody's"
        self.counters.count_step(plan)
        return outputs

    def check_invariants(self) -> None:
        """Check that every sequence is in one place and holds what its status says, no more."""
        self.cache.check_invariants()
        self._waiting.check_invariants()
        waiting, running = list(self._waiting), self._running
        samples = {seq for group in self._requests.values() for seq in group.samples}
        assert samples == {*waiting, *running} | (samples & {*self._leaving})
        assert len(self._requests) == self._waiting.num_accounts <= self._limits.max_requests
        assert len(running) <= self._limits.max_running_seqs
        assert all(not group.is_over for group in self._requests.values())
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

    def _check(self, seq: Sequence) -> None:
        assert seq.status is SequenceStatus.WAITING
        assert seq.sample_index == 0
        if seq.request_id in self._requests:
            raise InvalidRequest(f"request {seq.request_id!r} exists already", param="request_id")
        self._limits.check(seq, self.cache)
        if seq.lora_id is not None and not self._holds.knows(seq.lora_id):
            raise UnknownAdapter(f"no adapter {seq.lora_id!r} is loaded here")
        if len(self._waiting) >= self._limits.max_waiting_seqs:
            raise Overloaded(
                f"{len(self._waiting)} requests are queued already",
                retry_after_s=OVERLOAD_RETRY_AFTER_S,
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
        seq.prompt_logprobs.clear()
        seq.status = SequenceStatus.WAITING
        self._waiting.push_front(seq)
        self.counters.num_preemptions += 1

    def _start_waiting(self, builder: PlanBuilder) -> None:
        for seq in self._waiting.candidates():
            if builder.num_tokens_left == 0 or len(self._running) >= self._limits.max_num_seqs:
                return
            if not self._holds.can_start(seq):
                continue
            num_found_tokens = self.cache.admit(seq)
            if num_found_tokens is None:
                self._holds.undo_start(seq)
                return
            self._start(seq, num_found_tokens)
            builder.add(seq, self._holds.lora_index(seq))

    def _start(self, seq: Sequence, num_found_tokens: int) -> None:
        seq.num_computed_tokens = num_found_tokens
        if not seq.has_started:
            seq.has_started = True
            seq.num_cached_tokens = num_found_tokens
            self.counters.num_cached_tokens += num_found_tokens
            self._waiting.charge_start(seq)
        self._holds.unclaim(seq)
        self._waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        self._running.append(seq)

    def _fork(self, seq: Sequence, num_samples: int) -> list[Sequence]:
        """Return `seq` and, if it is about to draw for others too, those others.

        They run right behind it, so that what is in the middle of its prompt stays last. Where
        blocks or places are short they wait before all others.
        """
        others = [seq.fork(seq.sample_index + i) for i in range(1, num_samples)]
        seq.group.samples.extend(others)
        place = self._running.index(seq) + 1 if others else 0
        without_room: list[Sequence] = []
        for other in others:
            has_place = len(self._running) < self._limits.max_running_seqs
            if not without_room and has_place and self.cache.fork(seq, other):
                other.num_computed_tokens = seq.num_computed_tokens
                other.status = SequenceStatus.RUNNING
                self._running.insert(place, other)
                place += 1
            else:
                without_room.append(other)
        for other in reversed(without_room):
            self._waiting.push_front(other)
        return [seq, *others]

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
            self.cache.forget(seq)
            self._end(seq, FinishReason.ERROR)
            return error_output(seq)
        seq.token_ids.append(sampled.token_id)
        self.counters.num_tokens_generated += 1
        self._waiting.charge_token(seq)
        reason = find_finish_reason(seq, max_model_len=self._limits.max_model_len)
        if reason is not None:
            self._end(seq, reason)
        return token_output(seq, sampled, reason)

    def _end_all(self, seqs: Iterable[Sequence]) -> list[str]:
        """Abort sequences and return the ids of their requests, each once."""
        request_ids: dict[str, None] = {}
        for seq in list(seqs):
            if seq.status is not SequenceStatus.FINISHED:
                request_ids.setdefault(seq.request_id)
                self._end(seq, FinishReason.ABORT)
        return list(request_ids)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        """End `seq`, whatever it was doing: the only way out of the scheduler."""
        if seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        if seq.group.is_over:
            del self._requests[seq.request_id]
            self._waiting.leave(seq)
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
        """Return the blocks of an ended sequence, and with a request's last one its hold."""
        self.cache.release(seq)
        seq.group.samples.remove(seq)
        if not seq.group.samples:
            self._holds.drop(seq)
