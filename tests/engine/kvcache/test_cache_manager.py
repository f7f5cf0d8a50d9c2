"""The rules of the cache manager, one by one."""

import pytest

from engine.kvcache.block_pool import BlockPool
from engine.kvcache.cache_manager import BlockCopy, CacheManager
from engine.kvcache.prefix_index import PrefixIndex
from tests.engine.kvcache.worlds import compute, make_sequence


def make_cache(num_blocks=8, *, block_size=4, index=None):
    return CacheManager(BlockPool(num_blocks), block_size=block_size, index=index)


def admitted(cache, token_ids, *, root=b"root", **params):
    """Return a sequence that was admitted and is computed, and how much of it was found."""
    seq = make_sequence(token_ids, root=root, **params)
    num_found = cache.admit(seq)
    seq.num_computed_tokens = num_found
    compute(cache, seq)
    cache.check_invariants()
    return seq, num_found


@pytest.mark.parametrize(("num_blocks", "watermark"), [(1, 1), (100, 1), (101, 2), (1000, 10)])
def test_the_watermark_is_one_percent_rounded_up(num_blocks, watermark):
    assert make_cache(num_blocks).num_watermark_blocks == watermark


def test_the_watermark_is_asked_for_only_while_somebody_holds_blocks():
    cache = make_cache(3)
    first, _ = admitted(cache, [1])
    assert cache.admit(make_sequence(range(10, 18))) is None
    assert cache.admit(make_sequence(range(10, 14))) == 0
    cache.release(first)
    assert cache.admit(make_sequence(range(20, 25))) is None
    assert cache.can_ever_hold(12)
    assert not cache.can_ever_hold(13)


def test_a_sequence_as_long_as_the_pool_is_admitted_alone():
    assert make_cache(3).admit(make_sequence(range(12))) == 0


def test_what_cannot_be_found_is_reused_first_and_then_the_end_before_the_beginning():
    cache = make_cache(4, block_size=1)
    first, _ = admitted(cache, [1, 2])
    computed = list(first.block_table)
    assert cache.extend(first, 4)
    empty = first.block_table[2:]
    cache.release(first)
    second = make_sequence([7, 8, 9, 10])
    assert cache.admit(second) == 0
    assert second.block_table == [*empty[::-1], *computed[::-1]]


def test_a_block_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        make_cache(1, block_size=0)


class TestHits:
    def test_full_computed_blocks_are_found_by_the_next_sequence(self):
        cache = make_cache()
        first, _ = admitted(cache, [1, 2, 3, 4, 5, 6])
        second, num_found = admitted(cache, [1, 2, 3, 4, 9, 9])
        assert num_found == 4
        assert second.block_table[0] == first.block_table[0]
        assert second.block_table[1] != first.block_table[1]
        assert cache.num_cached_blocks == 1

    def test_the_last_token_is_always_left_to_compute(self):
        cache = make_cache()
        admitted(cache, range(8))
        assert admitted(cache, range(8))[1] == 4
        assert admitted(cache, range(9))[1] == 8

    def test_a_block_that_is_not_computed_is_not_found(self):
        cache = make_cache()
        seq = make_sequence(range(8))
        cache.admit(seq)
        compute(cache, seq, up_to=7)
        assert admitted(cache, range(9))[1] == 4

    def test_freed_blocks_stay_findable_until_they_are_reused(self):
        cache = make_cache(4, block_size=2)
        first, _ = admitted(cache, [1, 2, 3, 4])
        cache.release(first)
        assert cache.pool.num_free_blocks == 4
        second, num_found = admitted(cache, [1, 2, 3, 4, 5])
        assert num_found == 4
        cache.release(second)
        third, _ = admitted(cache, [7] * 6)  # takes the tail of what was free
        cache.release(third)
        assert admitted(cache, [1, 2, 3, 4, 5])[1] == 2

    def test_room_for_hits_is_counted_once(self):
        cache = make_cache(4)
        first, _ = admitted(cache, range(9))  # three blocks, two of them full
        assert cache.admit(make_sequence(range(10))) is None  # one new, and the watermark
        cache.release(first)
        again = make_sequence(range(16))  # two found among the free, two more: all there are
        assert cache.admit(again) == 8
        assert cache.pool.num_free_blocks == 0

    @pytest.mark.parametrize("other", [b"another version", b"another salt"])
    def test_equal_tokens_under_another_root_are_not_found(self, other):
        cache = make_cache()
        admitted(cache, range(8))
        assert admitted(cache, range(8), root=other)[1] == 0

    def test_token_ids_are_compared_when_all_digests_collide(self):
        index = PrefixIndex(lambda _parent, _token_ids: b"always the same")
        cache = make_cache(index=index)
        first, _ = admitted(cache, [1, 2, 3, 4, 5])
        assert admitted(cache, [9, 2, 3, 4, 5])[1] == 0
        assert admitted(cache, [1, 2, 3, 4, 5], root=b"another version")[1] == 0
        cache.release(first)
        assert admitted(cache, [1, 2, 3, 4, 1, 2, 3, 4, 5])[1] == 4

    def test_a_request_for_prompt_logprobs_reads_nothing_but_leaves_its_blocks(self):
        cache = make_cache()
        assert admitted(cache, range(8), num_prompt_logprobs=0)[1] == 0
        assert admitted(cache, range(9))[1] == 8
        assert admitted(cache, range(9), num_prompt_logprobs=0)[1] == 0

    def test_forgotten_blocks_are_not_found_while_others_still_use_them(self):
        cache = make_cache()
        first, _ = admitted(cache, range(9))
        second, num_found = admitted(cache, range(9))
        cache.forget(first)
        cache.check_invariants()
        assert (num_found, admitted(cache, range(9))[1]) == (8, 0)
        cache.release(second)
        cache.check_invariants()


class TestForks:
    def test_full_blocks_are_counted_once_more_and_the_partial_one_is_copied(self):
        cache = make_cache()
        seq, _ = admitted(cache, range(10))
        sample = seq.fork(1)
        assert cache.fork(seq, sample)
        sample.num_computed_tokens = 10
        cache.check_invariants()
        assert sample.block_table[:2] == seq.block_table[:2]
        copy = BlockCopy(source=seq.block_table[2], target=sample.block_table[2])
        assert cache.copies_for([sample]) == (copy,)
        assert cache.copies_for([seq]) == ()

    def test_without_a_partial_block_nothing_is_copied(self):
        cache = make_cache()
        seq, _ = admitted(cache, range(8))
        sample = seq.fork(1)
        assert cache.fork(seq, sample)
        assert sample.block_table == seq.block_table
        assert cache.copies_for([sample]) == ()

    def test_the_source_of_a_copy_is_held_until_the_copy_is_made(self):
        cache = make_cache()
        seq, _ = admitted(cache, range(6))
        sample = seq.fork(1)
        cache.fork(seq, sample)
        sample.num_computed_tokens = 6
        (copy,) = cache.copies_for([sample])
        cache.release(seq)
        cache.check_invariants()
        assert cache.pool.num_holders(copy.source) == 1
        sample.token_ids.append(6)
        compute(cache, sample)
        cache.check_invariants()
        assert cache.pool.num_holders(copy.source) == 0
        assert cache.copies_for([sample]) == ()

    def test_a_sample_that_lets_go_lets_go_of_its_copy_too(self):
        cache = make_cache()
        seq, _ = admitted(cache, range(6))
        sample = seq.fork(1)
        cache.fork(seq, sample)
        cache.release(sample)
        cache.release(seq)
        cache.check_invariants()
        assert cache.pool.num_free_blocks == 8

    def test_a_fork_leaves_the_watermark_or_changes_nothing(self):
        cache = make_cache(3)
        seq, _ = admitted(cache, range(6))
        sample = seq.fork(1)
        assert not cache.fork(seq, sample)
        assert sample.block_table == []
        cache.check_invariants()
