"""BlockPool against a model of a dictionary and a list."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kvcache.block_pool import BlockPool

NUM_BLOCKS = 7


class BlockPoolMachine(RuleBasedStateMachine):
    """The model: how often each block is held, and the free ones in the order of their freeing."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.free_order = list(range(NUM_BLOCKS))

    @rule(num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, num_blocks):
        block_ids = self.pool.allocate(num_blocks)
        if num_blocks > len(self.free_order):
            assert block_ids is None
            return
        assert block_ids == self.free_order[:num_blocks]
        del self.free_order[:num_blocks]
        for block_id in block_ids:
            self.held[block_id] = 1

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
    def share(self, block_ids):
        self.pool.share(block_ids)
        for block_id in block_ids:
            self.held[block_id] += 1
            if block_id in self.free_order:
                self.free_order.remove(block_id)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), is_worthless=st.booleans())
    def free(self, data, is_worthless):
        holds = [block_id for block_id, count in self.held.items() for _ in range(count)]
        positions = data.draw(
            st.lists(st.integers(0, len(holds) - 1), unique=True, min_size=1, max_size=5)
        )
        block_ids = [holds[position] for position in positions]
        (self.pool.free_worthless if is_worthless else self.pool.free)(block_ids)
        for block_id in block_ids:
            self.held[block_id] -= 1
            if self.held[block_id] == 0:
                self.free_order.insert(0 if is_worthless else len(self.free_order), block_id)

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check_invariants()
        assert self.pool.num_free_blocks == len(self.free_order)
        for block_id, count in self.held.items():
            assert self.pool.num_holders(block_id) == count


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(
    max_examples=max(settings().max_examples, 50), stateful_step_count=50, deadline=None
)


def test_a_block_freed_twice_is_an_error():
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(block_ids)


def test_the_block_that_is_free_for_longest_is_reused_first():
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.free([second, third])
    pool.free([first])
    assert pool.allocate(3) == [second, third, first]


def test_a_worthless_block_is_reused_before_all_others():
    pool = BlockPool(3)
    first, second, _third = pool.allocate(3)
    pool.free([first])
    pool.free_worthless([second])
    assert pool.allocate(2) == [second, first]


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.share(block_ids)
    pool.free(block_ids)
    assert pool.num_free_blocks == 0
    pool.free(block_ids)
    assert pool.num_free_blocks == 1


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
