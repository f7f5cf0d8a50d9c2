"""Gives blocks to sequences and takes them back; finds what is computed already."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.kvcache.block_pool import BlockPool
from engine.kvcache.prefix_index import PrefixIndex
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """K and V of block `source` are to be in `target` before the next step writes anything."""

    source: int
    target: int


class CacheManager:
    """Owns every block table: only this class writes to block_table and block_digests.

    Only Scheduler calls it. A table grows at its end, and is given back whole.

        [0, published)         full and computed; in the index, or an equal block is. Others may
                               count them; nobody writes to them any more
        [published, computed)  the last, partial block; ours alone
        [computed, …)          ours alone, not in the index, still to be written
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, index: PrefixIndex | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.pool = pool
        self.block_size = block_size
        # 1 %, rounded up: room for running sequences to grow, so that admitting one doesn't
        # preempt another in the next step.
        self.num_watermark_blocks = -(-pool.num_blocks // 100)
        self._index = PrefixIndex() if index is None else index
        # Of every sequence that has blocks: how many of them are published.
        self._num_published: dict[Sequence, int] = {}
        # Of forked sequences: the copy of the last block that their next step needs. The source
        # is held for it until that step is committed.
        self._copies: dict[Sequence, BlockCopy] = {}

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be found, held or free."""
        return len(self._index)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` fits while it is alone."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_blocks

    def admit(self, seq: Sequence) -> int | None:
        """Give blocks for all tokens of `seq`; return how many tokens are computed already.

        None means no room for them and the watermark, and no change. At least the last token is
        left to compute. A sequence that wants logits of its prompt reads nothing.
        """
        assert not seq.block_table, f"{seq.request_id} has blocks"
        found = [] if seq.wants_prompt_logprobs else self._find(seq)
        num_new_blocks = self.num_blocks_for(seq.num_tokens) - len(found)
        num_taken = num_new_blocks + sum(self.pool.num_holders(block) == 0 for block in found)
        if not self._has_room(num_taken):
            return None
        self.pool.share(found)
        seq.block_table.extend(found)
        self._num_published[seq] = len(found)
        has_room = self.extend(seq, seq.num_tokens)
        assert has_room, "the room has been counted"
        return len(found) * self.block_size

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Append blocks until `num_tokens` tokens fit; False means no room, and no change."""
        num_new_blocks = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if num_new_blocks <= 0:
            return True
        block_ids = self._allocate(num_new_blocks)
        if block_ids is None:
            return False
        seq.block_table.extend(block_ids)
        self._num_published.setdefault(seq, 0)
        return True

    def fork(self, seq: Sequence, sample: Sequence) -> bool:
        """Give `sample` what `seq` has computed; False means no room, and no change.

        Full blocks are counted once more; of a partial one the sample gets a copy, which its
        next step has to make (see copies_for). Like admit, it leaves the watermark.
        """
        assert not sample.block_table, f"{sample.request_id} has blocks"
        num_full, num_over = divmod(seq.num_computed_tokens, self.block_size)
        if not self._has_room(1 if num_over else 0):
            return False
        if num_over:
            target = self._allocate(1)
            assert target is not None, "the room has been counted"
            source = seq.block_table[num_full]
            self.pool.share((source,))
            self._copies[sample] = BlockCopy(source=source, target=target[0])
        else:
            target = []
        self.pool.share(seq.block_table[:num_full])
        sample.block_table.extend([*seq.block_table[:num_full], *target])
        self._num_published[sample] = num_full
        return True

    def copies_for(self, seqs: Iterable[Sequence]) -> tuple[BlockCopy, ...]:
        """Return the copies to make before a step that computes `seqs`."""
        return tuple(self._copies[seq] for seq in seqs if seq in self._copies)

    def mark_computed(self, seq: Sequence) -> None:
        """Publish the blocks that a committed step has filled, and let go of what it copied."""
        first, last = self._num_published[seq], seq.num_computed_tokens // self.block_size
        self._digest(seq, last)
        for i in range(first, last):
            self._index.publish(
                seq.block_table[i],
                seq.block_digests[i],
                parent=self._parent(seq, i),
                token_ids=self._tokens(seq, i),
            )
        self._num_published[seq] = max(first, last)
        self._drop_copy(seq)

    def forget(self, seq: Sequence) -> None:
        """Make all blocks of `seq` unfindable, whoever computed them: one of them is in doubt."""
        for block_id in seq.block_table:
            self._index.forget(block_id)

    def release(self, seq: Sequence) -> None:
        """Give all blocks of `seq` back; nothing happens if it has none.

        Tail first, so that its beginning stays findable for longest; what can't be found is
        reused before anything else.
        """
        self._drop_copy(seq)
        self.pool.free(block for block in reversed(seq.block_table) if block in self._index)
        self.pool.free_worthless(block for block in seq.block_table if block not in self._index)
        seq.block_table.clear()
        self._num_published.pop(seq, None)

    def check_invariants(self) -> None:
        """Check that every held block is in as many tables as it has holders.

        And that whoever is going to write to a block holds it alone, and that it can't be found.
        """
        self.pool.check_invariants()
        self._index.check_invariants()
        uses = Counter(block_id for seq in self._num_published for block_id in seq.block_table)
        copies = Counter(copy.source for copy in self._copies.values())
        for block_id in range(self.pool.num_blocks):
            num_uses = uses[block_id] + copies[block_id]
            assert num_uses == self.pool.num_holders(block_id), f"block {block_id} leaks"
        for seq, num_published in self._num_published.items():
            assert seq.block_table, f"{seq.request_id} is a holder without blocks"
            assert len(set(seq.block_table)) == len(seq.block_table), "a block twice in a table"
            assert num_published == seq.num_computed_tokens // self.block_size
            for block_id in seq.block_table[num_published:]:
                assert uses[block_id] == 1, "a block that will be written to is shared"
                assert block_id not in self._index, "a block that isn't full can be found"
        assert self._copies.keys() <= self._num_published.keys(), "a copy for nobody"

    def _has_room(self, num_blocks: int) -> bool:
        # The watermark is for sequences that hold blocks already. While none does it isn't asked
        # for: else a sequence as long as the pool could never start.
        num_watermark_blocks = self.num_watermark_blocks if self._num_published else 0
        return num_blocks + num_watermark_blocks <= self.pool.num_free_blocks

    def _allocate(self, num_blocks: int) -> list[int] | None:
        block_ids = self.pool.allocate(num_blocks)
        for block_id in block_ids or ():
            self._index.forget(block_id)
        return block_ids

    def _find(self, seq: Sequence) -> list[int]:
        """Return the blocks that hold the beginning of `seq`, its last token never among them."""
        found: list[int] = []
        for i in range((seq.num_tokens - 1) // self.block_size):
            self._digest(seq, i + 1)
            block_id = self._index.find(
                seq.block_digests[i], parent=self._parent(seq, i), token_ids=self._tokens(seq, i)
            )
            if block_id is None:
                break
            found.append(block_id)
        return found

    def _digest(self, seq: Sequence, num_blocks: int) -> None:
        for i in range(len(seq.block_digests), num_blocks):
            digest = self._index.digest_of(self._parent(seq, i), self._tokens(seq, i))
            seq.block_digests.append(digest)

    def _parent(self, seq: Sequence, i: int) -> bytes:
        return seq.block_digests[i - 1] if i else seq.cache_root

    def _tokens(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _drop_copy(self, seq: Sequence) -> None:
        copy = self._copies.pop(seq, None)
        if copy is not None:
            self.pool.free((copy.source,))
