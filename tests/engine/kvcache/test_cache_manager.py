"""CacheManager against a model that only counts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kvcache.block_pool import BlockPool
from engine.kvcache.cache_manager import CacheManager
from engine.protocol import SamplingParams
from engine.sequence import Sequence


def make_sequence(name="s"):
    return Sequence(
        request_id=name,
        token_ids=[1],
        num_prompt_tokens=1,
        params=SamplingParams(max_tokens=1),
        seed=0,
        eos_token_ids=(),
    )


class CacheManagerMachine(RuleBasedStateMachine):
    """The model: how many tokens each sequence has room for. Tables only grow at their end."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache = CacheManager(BlockPool(num_blocks), block_size=block_size)
        self.seqs = [make_sequence(str(i)) for i in range(4)]
        self.num_tokens = dict.fromkeys(range(4), 0)

    def blocks(self, num_tokens):
        return (num_tokens + self.block_size - 1) // self.block_size

    @property
    def num_free(self):
        return self.num_blocks - sum(map(self.blocks, self.num_tokens.values()))

    @rule(i=st.integers(0, 3), num_tokens=st.integers(0, 40))
    def extend(self, i, num_tokens):
        seq = self.seqs[i]
        before = list(seq.block_table)
        num_new = max(self.blocks(num_tokens) - len(before), 0)
        fits = num_new <= self.num_free
        assert self.cache.extend(seq, num_tokens) is fits
        assert seq.block_table[: len(before)] == before
        if fits:
            self.num_tokens[i] = max(num_tokens, self.num_tokens[i])

    @rule(i=st.integers(0, 3))
    def release(self, i):
        self.cache.release(self.seqs[i])
        self.num_tokens[i] = 0

    @rule(num_tokens=st.integers(1, 60))
    def admit(self, num_tokens):
        watermark = 1 if any(self.num_tokens.values()) else 0
        expected = self.blocks(num_tokens) + watermark <= self.num_free
        assert self.cache.can_admit(num_tokens) is expected
        if expected:
            assert self.cache.can_ever_hold(num_tokens)

    @invariant()
    def agrees_with_the_model(self):
        self.cache.check_invariants()
        assert self.cache.pool.num_free_blocks == self.num_free
        held = [block_id for seq in self.seqs for block_id in seq.block_table]
        assert len(held) == len(set(held))
        for i, seq in enumerate(self.seqs):
            assert len(seq.block_table) == self.blocks(self.num_tokens[i])


TestCacheManagerMachine = CacheManagerMachine.TestCase
TestCacheManagerMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("num_blocks", "watermark"), [(1, 1), (100, 1), (101, 2), (1000, 10)])
def test_the_watermark_is_one_percent_rounded_up(num_blocks, watermark):
    cache = CacheManager(BlockPool(num_blocks), block_size=4)
    assert cache.num_watermark_blocks == watermark


def test_the_watermark_is_asked_for_only_while_somebody_holds_blocks():
    cache = CacheManager(BlockPool(3), block_size=4)
    assert cache.can_admit(12)
    seq = make_sequence()
    cache.extend(seq, 1)
    assert cache.can_admit(4)
    assert not cache.can_admit(8)
    cache.release(seq)
    assert cache.can_admit(12)


def test_the_end_of_a_sequence_is_reused_before_its_beginning():
    cache = CacheManager(BlockPool(3), block_size=1)
    first, second = make_sequence("first"), make_sequence("second")
    cache.extend(first, 3)
    table = list(first.block_table)
    cache.release(first)
    cache.extend(second, 3)
    assert second.block_table == table[::-1]


def test_a_block_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        CacheManager(BlockPool(1), block_size=0)
