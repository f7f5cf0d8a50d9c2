"""Any order of add, abort, step, load and unload: all finish, nothing leaks, nobody starves."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.errors import EngineError
from engine.scheduler.plan import SampledToken
from engine.sequence import SequenceStatus
from tests.engine.scheduler.worlds import (
    EOS,
    Adapters,
    is_over,
    make_scheduler,
    make_sequence,
    sample_all,
)

LORA_IDS = ("x", "y", "z")
MAX_MODEL_LEN = 24
REQUESTS = st.tuples(
    st.integers(1, 8),  # num_prompt_tokens
    st.sampled_from([12, 9, 6, 3, 1]),  # max_tokens
    st.sampled_from([None, *LORA_IDS]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """The model: for each request, the tokens that have come out and whether it is over."""

    @initialize(
        requests=st.lists(REQUESTS, min_size=3, max_size=8),
        num_blocks=st.integers(5, 12),
        block_size=st.integers(1, 3),
        max_num_seqs=st.integers(2, 5),
        max_tokens_per_step=st.integers(1, 9),
        max_resident=st.integers(1, 3),
        max_overtakes=st.integers(1, 4),
    )
    def start(self, requests, max_resident, **limits):
        self.limits = limits
        self.residency = Adapters(*LORA_IDS, max_resident=max_resident)
        self.scheduler = make_scheduler(
            residency=self.residency, max_model_len=MAX_MODEL_LEN, max_waiting_seqs=12, **limits
        )
        self.live = {}
        self.tokens = {}
        self.num_added = 0
        self.num_steps = 0
        self.num_generated = 0
        self.plan = None
        self.loading = None
        self.add_some(requests)

    # --- what clients and adapters do ---------------------------------------------------------

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add_some(self, requests):
        for request in requests:
            self.add(*request)

    def add(self, num_prompt_tokens, max_tokens, lora_id):
        self.num_added += 1
        seq = make_sequence(
            f"r{self.num_added}",
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            lora_id=lora_id,
        )
        try:
            self.scheduler.add(seq)
        except EngineError:
            return
        self.live[seq.request_id] = seq
        self.tokens[seq.request_id] = list(seq.token_ids)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        assert is_over(self.live.pop(request_id))

    @rule()
    def begin_load(self):
        if self.loading is None:
            self.loading = self.residency.next_load()

    @rule(fails=st.booleans())
    def end_load(self, fails):
        load, self.loading = self.loading, None
        if load is None:
            return
        if fails:
            self.residency.load_failed(load.lora_id, "torn image")
            self.take_ended(self.scheduler.fail_waiting(load.lora_id), load.lora_id)
            self.add_again()
        else:
            self.residency.loaded(load.lora_id)

    @rule(lora_id=st.sampled_from(LORA_IDS))
    def begin_unload(self, lora_id):
        self.take_ended(self.scheduler.fail_waiting(lora_id), lora_id)
        if self.residency.knows(lora_id):
            self.residency.unload(lora_id)

    @rule(lora_id=st.sampled_from(LORA_IDS))
    def end_unload(self, lora_id):
        if self.residency.is_draining(lora_id):
            self.take_ended(self.scheduler.abort_running(lora_id), lora_id)
            assert all(seq.lora_id != lora_id for seq in self.live.values())
        self.add_again()

    def take_ended(self, ended, lora_id):
        for request_id in ended:
            seq = self.live.pop(request_id)
            assert seq.lora_id == lora_id
            assert is_over(seq)

    def add_again(self):
        for lora_id in LORA_IDS:
            if not self.residency.knows(lora_id) and not self.residency.is_draining(lora_id):
                self.residency.add_one(lora_id)

    # --- what the core does -------------------------------------------------------------------

    @rule()
    def plan_step(self):
        running = [s for s in self.live.values() if s.status is SequenceStatus.RUNNING]
        num_preemptions = self.scheduler.counters.num_preemptions
        self.plan = self.scheduler.plan_step()
        chunks = self.plan.chunks if self.plan else ()
        planned = {chunk.sequence for chunk in chunks}
        assert sum(chunk.num_tokens for chunk in chunks) <= self.limits["max_tokens_per_step"]
        assert len(planned) == len(chunks) == self.scheduler.num_running
        for seq in running:
            # In the step or preempted; the one that has run longest is never preempted.
            assert seq in planned or seq.status is SequenceStatus.WAITING
        assert not running or any(seq in planned for seq in running)
        if self.scheduler.counters.num_preemptions > num_preemptions:
            assert planned <= set(running), "nobody starts in a step that preempts"
        self.check_chunks(chunks)

    def check_chunks(self, chunks):
        adapters = [chunk.lora_index for chunk in chunks]
        runs = [a for i, a in enumerate(adapters) if i == 0 or adapters[i - 1] != a]
        assert len(runs) == len(set(runs)), "an adapter's chunks are one run"
        assert None not in runs[1:], "the base comes first"
        for chunk in chunks:
            seq, end = chunk.sequence, chunk.start + chunk.num_tokens
            assert chunk.start == seq.num_computed_tokens
            assert chunk.num_tokens > 0
            assert chunk.samples == (end == seq.num_tokens)
            assert end <= len(seq.block_table) * self.limits["block_size"]
            if seq.lora_id is None:
                assert chunk.lora_index is None
            else:
                assert self.residency.leases[seq.lora_id] > 0
                if self.residency.knows(seq.lora_id):
                    assert chunk.lora_index == self.residency.lora_index_of(seq.lora_id)

    @precondition(lambda self: self.plan is not None)
    @rule(unusual=st.dictionaries(st.integers(0, 4), st.sampled_from([EOS, None]), max_size=1))
    def commit(self, unusual):
        plan, self.plan = self.plan, None
        sampled = sample_all(plan)
        for position, token_id in unusual.items():
            if position < len(sampled):
                sampled[position] = SampledToken(token_id=token_id)
        outputs = self.scheduler.commit(plan, sampled)
        self.num_steps += 1
        expected = {c.sequence.request_id for c in plan.chunks if c.samples} & self.live.keys()
        assert {output.request_id for output in outputs} == expected
        for output in outputs:
            self.num_generated += len(output.token_ids)
            self.tokens[output.request_id] += output.token_ids
            seq = self.live[output.request_id]
            assert is_over(seq) is (output.finish_reason is not None)
            if is_over(seq):
                assert not seq.block_table
                del self.live[output.request_id]

    @rule(num_steps=st.integers(2, 9))
    def run(self, num_steps):
        for _ in range(num_steps):
            self.begin_load()
            self.end_load(fails=False)
            self.plan_step()
            if self.plan is not None:
                self.commit({})

    @invariant()
    def nothing_is_lost(self):
        self.scheduler.check_invariants()
        for request_id, seq in self.live.items():
            assert seq.token_ids == self.tokens[request_id]
        counters = self.scheduler.counters
        assert counters.num_steps == self.num_steps
        assert counters.num_tokens_generated == self.num_generated
        assert counters.num_steps_with_several_adapters <= counters.num_steps_with_several_chunks
        self.residency.check_invariants()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Everybody comes to an end, though new requests for hot adapters keep arriving.
        before = set(self.live.values())
        for i in range(60 * len(before) + 400):
            if all(map(is_over, before)):
                break
            self.add(1 + i % 3, 1 + i % 4, LORA_IDS[i % 2])
            self.bring_on()
        assert all(map(is_over, before)), "a sequence starves"
        for _ in range(60 * len(self.live) + 400):
            self.bring_on()
        assert not self.scheduler.has_work
        assert self.residency.num_holds == 0
        assert self.scheduler.cache.pool.num_free_blocks == self.limits["num_blocks"]

    def bring_on(self):
        self.add_again()
        self.begin_load()
        self.end_load(fails=False)
        plan = self.scheduler.plan_step()
        if plan is not None:
            self.scheduler.commit(plan, sample_all(plan))
            self.scheduler.check_invariants()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
