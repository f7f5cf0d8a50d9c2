"""Any order of add, abort, step, load and unload: all finish, nothing leaks, nobody starves.

With a cache that is shared by some, several samples, and preempted now and then.
"""

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
from engine.protocol import TokenLogprob
from engine.scheduler.fair_queue import QueuePolicy
from engine.scheduler.plan import SampledToken
from engine.sequence import SequenceStatus
from tests.engine.scheduler.worlds import (
    EOS,
    Adapters,
    KvModel,
    is_over,
    make_scheduler,
    make_sequence,
    sample_all,
    token_after,
)

LORA_IDS = ("x", "y", "z")
MAX_MODEL_LEN = 24
REQUESTS = st.tuples(
    st.integers(1, 8),  # num_prompt_tokens
    st.sampled_from([12, 9, 6, 3, 1]),  # max_tokens
    st.sampled_from([None, *LORA_IDS]),
    st.sampled_from([1, 1, 2, 3]),  # n
    st.sampled_from(["", "", "own"]),  # salt
    st.integers(0, 1),  # priority; also whose request it is
    st.sampled_from([None, None, 0]),  # num_prompt_logprobs
)


def logprob_entry(token_id):
    return [TokenLogprob(token_id, -0.5)]


def prompt_logprobs_of(plan):
    """What the core would find for the prompts of a step."""
    found = {}
    for position, chunk in enumerate(plan.chunks):
        following = chunk.sequence.token_ids[chunk.start + 1 :][: chunk.num_prompt_logits]
        if following:
            found[position] = [logprob_entry(token_id) for token_id in following]
    return found


class SchedulerMachine(RuleBasedStateMachine):
    """The model: for each sample, the tokens that have come out; what each KV slot holds.

    The request is over when all its samples are.
    """

    @initialize(
        requests=st.lists(REQUESTS, min_size=3, max_size=8),
        num_blocks=st.integers(5, 12),
        block_size=st.integers(1, 3),
        max_num_seqs=st.integers(2, 5),
        max_tokens_per_step=st.integers(1, 9),
        max_resident=st.integers(1, 3),
        max_overtakes=st.integers(1, 4),
        policy=st.sampled_from(QueuePolicy),
    )
    def start(self, requests, max_resident, **limits):
        self.limits = limits
        self.residency = Adapters(*LORA_IDS, max_resident=max_resident)
        self.scheduler = make_scheduler(
            residency=self.residency, max_model_len=MAX_MODEL_LEN, max_waiting_seqs=12, **limits
        )
        self.live = {}  # the samples of each request that goes on, by index
        self.tokens = {}  # of each sample, its prompt included
        self.kv = KvModel(limits["block_size"])
        self.num_added = 0
        self.num_steps = 0
        self.num_generated = 0
        self.plan = None
        self.loading = None
        self.ended = set()
        self.add_some(requests)

    # --- what clients and adapters do ---------------------------------------------------------

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add_some(self, requests):
        for request in requests:
            self.add(*request)

    def add(
        self,
        num_prompt_tokens,
        max_tokens,
        lora_id,
        n=1,
        salt="",
        priority=0,
        num_prompt_logprobs=None,
    ):
        self.num_added += 1
        seq = make_sequence(
            f"r{self.num_added}",
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            lora_id=lora_id,
            n=n,
            salt=salt,
            priority=priority,
            tenant=str(priority),
            num_prompt_logprobs=num_prompt_logprobs,
        )
        try:
            self.scheduler.add(seq)
        except EngineError:
            return
        self.live[seq.request_id] = {0: seq}
        self.tokens[seq.request_id, 0] = list(seq.token_ids)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        assert all(map(is_over, self.live.pop(request_id).values()))

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
            assert all(seq.lora_id != lora_id for seq in self.samples)
        self.add_again()

    def take_ended(self, ended, lora_id):
        assert len(ended) == len(set(ended))
        for request_id in ended:
            for seq in self.live.pop(request_id).values():
                assert seq.lora_id == lora_id
                assert is_over(seq)

    def add_again(self):
        for lora_id in LORA_IDS:
            if not self.residency.knows(lora_id) and not self.residency.is_draining(lora_id):
                self.residency.add_one(lora_id)

    # --- what the core does -------------------------------------------------------------------

    @rule()
    def make_plan(self):
        self.plan_step()

    def plan_step(self):
        running = [s for s in self.samples if s.status is SequenceStatus.RUNNING]
        self.plan = self.scheduler.plan_step()
        chunks = self.plan.chunks if self.plan else ()
        planned = {chunk.sequence for chunk in chunks}
        assert sum(chunk.num_tokens for chunk in chunks) <= self.limits["max_tokens_per_step"]
        assert len(planned) == len(chunks) == self.scheduler.num_running
        for seq in running:
            # In the step or preempted; the one that has run longest is never preempted.
            assert seq in planned or seq.status is SequenceStatus.WAITING
        assert not running or any(seq in planned for seq in running)
        self.check_chunks(chunks)
        if self.plan is not None:
            self.kv.run(self.plan)

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
            self.check_writes(seq, chunk.start, end)
            if seq.lora_id is None:
                assert chunk.lora_index is None
            else:
                assert self.residency.leases[seq.lora_id] > 0
                if self.residency.knows(seq.lora_id):
                    assert chunk.lora_index == self.residency.lora_index_of(seq.lora_id)

    def check_writes(self, seq, start, end):
        """A block that is written to is in nobody else's table."""
        size = self.limits["block_size"]
        written = set(seq.block_table[start // size : -(-end // size)])
        others = [other for other in self.samples if other is not seq]
        assert all(written.isdisjoint(other.block_table) for other in others)

    @property
    def samples(self):
        return [seq for samples in self.live.values() for seq in samples.values()]

    @precondition(lambda self: self.plan is not None)
    @rule(unusual=st.dictionaries(st.integers(0, 4), st.sampled_from([EOS, None]), max_size=1))
    def commit(self, unusual):
        self.commit_step(unusual)

    def commit_step(self, unusual):
        plan, self.plan = self.plan, None
        sampled = sample_all(plan, token_after)
        for position, token_id in unusual.items():
            if position < len(sampled):
                sampled[position] = SampledToken(token_id=token_id)
        expected = [
            (chunk.sequence.request_id, sample_index)
            for chunk in plan.chunks
            for sample_index in chunk.drawn_samples
            if chunk.sequence.request_id in self.live and not is_over(chunk.sequence)
        ]
        logprobs = prompt_logprobs_of(plan)
        outputs = self.scheduler.commit(plan, sampled, logprobs)
        self.num_steps += 1
        assert [(output.request_id, output.sample_index) for output in outputs] == expected
        for output in outputs:
            self.take(output)
        self.learn_samples()

    def take(self, output):
        key = output.request_id, output.sample_index
        prompt = self.tokens[output.request_id, 0][: self.num_prompt_tokens(output.request_id)]
        tokens = self.tokens.setdefault(key, list(prompt))
        is_first = key[1] == 0 and len(tokens) == len(prompt)
        wants = self.live[output.request_id][0].params.num_prompt_logprobs is not None
        if wants and is_first and output.token_ids:
            assert output.prompt_logprobs == [None, *map(logprob_entry, prompt[1:])]
        else:
            assert output.prompt_logprobs is None
        self.num_generated += len(output.token_ids)
        tokens += output.token_ids
        if output.finish_reason is not None:
            self.ended.add(key)

    def num_prompt_tokens(self, request_id):
        return self.live[request_id][0].num_prompt_tokens

    def learn_samples(self):
        """Get to know the samples that have forked, and forget requests that are over."""
        for request_id, samples in list(self.live.items()):
            samples |= {seq.sample_index: seq for seq in samples[0].group.samples}
            for index, seq in samples.items():
                assert is_over(seq) is ((request_id, index) in self.ended)
                if is_over(seq):
                    assert not seq.block_table
            n = samples[0].params.n
            if sum((request_id, index) in self.ended for index in range(n)) == n:
                del self.live[request_id]
                assert not self.scheduler.abort(request_id)

    @rule(num_steps=st.integers(2, 9))
    def run(self, num_steps):
        for _ in range(num_steps):
            self.begin_load()
            self.end_load(fails=False)
            self.plan_step()
            if self.plan is not None:
                self.commit_step({})

    @invariant()
    def nothing_is_lost(self):
        self.scheduler.check_invariants()
        self.scheduler.cache.check_invariants()
        for seq in self.samples:
            assert seq.token_ids == self.tokens[seq.request_id, seq.sample_index]
        counters = self.scheduler.counters
        assert counters.num_steps == self.num_steps
        assert counters.num_tokens_generated == self.num_generated
        assert counters.num_steps_with_several_adapters <= counters.num_steps_with_several_chunks
        self.residency.check_invariants()

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Everybody comes to an end, though requests for hot adapters, no more urgent, keep coming.
        before = set(self.live)
        for i in range(60 * len(before) + 400):
            if not before & self.live.keys():
                break
            self.add(1 + i % 3, 1 + i % 4, LORA_IDS[i % 2], priority=1)
            self.bring_on()
        assert not before & self.live.keys(), "a sequence starves"
        for _ in range(60 * len(self.live) + 400):
            self.bring_on()
        assert not self.scheduler.has_work
        assert self.residency.num_holds == 0
        assert self.scheduler.cache.pool.num_free_blocks == self.limits["num_blocks"]

    def bring_on(self):
        self.add_again()
        self.begin_load()
        self.end_load(fails=False)
        self.plan_step()
        if self.plan is not None:
            self.commit_step({})
            self.scheduler.check_invariants()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=max(settings().max_examples, 60), stateful_step_count=50, deadline=None
)
