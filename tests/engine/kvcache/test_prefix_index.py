"""What the index finds, and what it refuses to take for the same."""

import itertools

import pytest

from engine.kvcache.prefix_index import PrefixIndex, block_digest, kv_root

ROOT = b"root"


def index_with(block_id, token_ids, *, parent=ROOT, digest_of=block_digest):
    index = PrefixIndex(digest_of)
    digest = digest_of(parent, token_ids)
    index.publish(block_id, digest, parent=parent, token_ids=token_ids)
    return index, digest


def test_a_block_is_found_by_its_tokens_and_their_past():
    index, digest = index_with(7, [1, 2])
    assert index.find(digest, parent=ROOT, token_ids=[1, 2]) == 7
    other = block_digest(b"other root", [1, 2])
    assert index.find(other, parent=b"other root", token_ids=[1, 2]) is None


@pytest.mark.parametrize(
    ("parent", "token_ids"), [(ROOT, [1, 3]), (ROOT, [1]), (b"other root", [1, 2])]
)
def test_a_colliding_digest_is_no_hit(parent, token_ids):
    index, digest = index_with(7, [1, 2], digest_of=lambda _parent, _token_ids: b"always the same")
    assert index.find(digest, parent=parent, token_ids=token_ids) is None
    assert index.find(digest, parent=ROOT, token_ids=[1, 2]) == 7


def test_of_two_equal_blocks_the_first_is_found_until_it_is_forgotten():
    index, digest = index_with(7, [1, 2])
    index.publish(8, digest, parent=ROOT, token_ids=[1, 2])
    assert index.find(digest, parent=ROOT, token_ids=[1, 2]) == 7
    assert 8 not in index
    index.forget(8)
    index.forget(7)
    assert index.find(digest, parent=ROOT, token_ids=[1, 2]) is None
    index.publish(8, digest, parent=ROOT, token_ids=[1, 2])
    assert index.find(digest, parent=ROOT, token_ids=[1, 2]) == 8
    index.check_invariants()
    assert len(index) == 1


def test_roots_differ_in_base_version_and_salt_and_nothing_runs_together():
    roots = [
        kv_root(base_identity=base, version=version, salt=salt)
        for base, version, salt in itertools.product(
            ["b", "bs", "b adapter s"], [None, "", "s", "sha256:0"], ["", "s", "adapter s"]
        )
    ]
    assert len(set(roots)) == len(roots)


def test_the_same_base_version_and_salt_have_the_same_root():
    one, other = (kv_root(base_identity="b", version="v", salt="s") for _ in range(2))
    assert one == other
