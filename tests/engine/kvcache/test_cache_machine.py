"""Any order of admit, grow, compute, fork, lose and release: nothing leaks, nobody is deceived."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.kvcache.block_pool import BlockPool
from engine.kvcache.cache_manager import CacheManager
from engine.kvcache.prefix_index import kv_root
from tests.engine.kvcache.worlds import make_sequence

ROOTS = [
    kv_root(base_identity="base", version=version, salt=salt)
    for version in (None, "v1", "v2")
    for salt in ("", "tenant")
]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class CacheManagerMachine(RuleBasedStateMachine):
    """The model: what each slot was last written with, which is all that its K and V depend on.

    A sequence that reads its past must find there what it would have written itself; a block that
    is written is in no other table.
    """

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4))
    def start(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache = CacheManager(BlockPool(num_blocks), block_size=block_size)
        self.slots = {}
        self.live = []

    def blocks(self, num_tokens):
        return (num_tokens + self.block_size - 1) // self.block_size

    @property
    def held(self):
        sources = {copy.source for copy in self.cache.copies_for(self.live)}
        return sources.union(*(seq.block_table for seq in self.live))

    @rule(token_ids=TOKENS, root=st.sampled_from(ROOTS[:2] + ROOTS), reads=st.booleans())
    def admit(self, token_ids, root, reads):
        seq = make_sequence(token_ids, root=root, num_prompt_logprobs=None if reads else 0)
        self.readmit(seq)

    def readmit(self, seq):
        num_free = self.num_blocks - len(self.held)
        watermark = self.cache.num_watermark_blocks if self.live else 0
        num_found = self.cache.admit(seq)
        if num_found is None:
            assert not seq.block_table
            assert self.blocks(seq.num_tokens) + watermark > num_free
            return
        assert num_found < seq.num_tokens
        assert num_found % self.block_size == 0
        assert num_found == 0 or not seq.wants_prompt_logprobs
        assert len(seq.block_table) == self.blocks(seq.num_tokens)
        seq.num_computed_tokens = num_found
        self.live.append(seq)
        assert self.num_blocks - len(self.held) >= watermark
        self.check_past(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_ids=TOKENS)
    def grow(self, data, token_ids):
        seq = data.draw(st.sampled_from(self.live))
        before, num_free = list(seq.block_table), self.num_blocks - len(self.held)
        num_tokens = seq.num_tokens + len(token_ids)
        num_new = max(self.blocks(num_tokens) - len(before), 0)
        fits = self.cache.extend(seq, num_tokens)
        assert fits is (num_new <= num_free)
        assert seq.block_table[: len(before)] == before
        if fits:
            seq.token_ids += token_ids
        else:
            assert seq.block_table == before

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), is_committed=st.booleans())
    def compute(self, data, num_tokens, is_committed):
        """A step of one chunk; one that is never committed has still written."""
        seq = data.draw(st.sampled_from(self.live))
        stop = min(seq.num_computed_tokens + num_tokens, seq.num_tokens)
        for copy in self.cache.copies_for([seq]):
            for offset in range(self.block_size):
                self.slots[copy.target, offset] = self.slots.get((copy.source, offset))
        for position in range(seq.num_computed_tokens, stop):
            block_id, offset = self.slot(seq, position)
            others = [other for other in self.live if other is not seq]
            assert all(block_id not in other.block_table for other in others)
            self.slots[block_id, offset] = self.content(seq, position)
        self.check_past(seq, stop)
        if is_committed:
            seq.num_computed_tokens = stop
            self.cache.mark_computed(seq)

    @precondition(lambda self: any(self.can_fork(seq) for seq in self.live))
    @rule(data=st.data())
    def fork(self, data):
        seq = data.draw(st.sampled_from([seq for seq in self.live if self.can_fork(seq)]))
        sample = seq.fork(1)
        num_free = self.num_blocks - len(self.held)
        is_partial = seq.num_computed_tokens % self.block_size > 0
        has_room = is_partial + self.cache.num_watermark_blocks <= num_free
        assert self.cache.fork(seq, sample) is has_room
        if has_room:
            sample.num_computed_tokens = seq.num_computed_tokens
            sample.token_ids.append(2)
            self.live.append(sample)
            if self.cache.extend(sample, sample.num_tokens):
                return
        self.cache.release(sample)
        self.live = [other for other in self.live if other is not sample]

    def can_fork(self, seq):
        is_whole = seq.num_computed_tokens == seq.num_prompt_tokens
        return is_whole and seq.num_generated_tokens == 0 and not self.cache.copies_for([seq])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_preempted=st.booleans())
    def release(self, data, is_preempted):
        seq = data.draw(st.sampled_from(self.live))
        self.live.remove(seq)
        self.cache.release(seq)
        seq.num_computed_tokens = 0
        assert not seq.block_table
        if is_preempted:
            self.readmit(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def doubt(self, data):
        self.cache.forget(data.draw(st.sampled_from(self.live)))

    def slot(self, seq, position):
        index, offset = divmod(position, self.block_size)
        return seq.block_table[index], offset

    def content(self, seq, position):
        return (seq.cache_root, *seq.token_ids[: position + 1])

    def check_past(self, seq, stop=None):
        for position in range(seq.num_computed_tokens if stop is None else stop):
            assert self.slots[self.slot(seq, position)] == self.content(seq, position)

    @invariant()
    def agrees_with_the_model(self):
        self.cache.check_invariants()
        assert self.cache.pool.num_free_blocks == self.num_blocks - len(self.held)
        assert self.cache.num_cached_blocks <= self.num_blocks


TestCacheManagerMachine = CacheManagerMachine.TestCase
TestCacheManagerMachine.settings = settings(
    max_examples=max(settings().max_examples, 60), stateful_step_count=50, deadline=None
)
