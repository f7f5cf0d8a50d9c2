"""Gives blocks to sequences and takes them back."""

from collections import Counter

from engine.kvcache.block_pool import BlockPool
from engine.sequence import Sequence


class CacheManager:
    """Owns every block table: only this class writes to Sequence.block_table.

    Only Scheduler calls it. A table grows at its end, and is given back whole.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.pool = pool
        self.block_size = block_size
        # 1 %, rounded up: room for running sequences to grow, so that admitting one doesn't
        # preempt another in the next step.
        self.num_watermark_blocks = -(-pool.num_blocks // 100)
        self._holders: set[Sequence] = set()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` fits while it is alone."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_blocks

    def can_admit(self, num_tokens: int) -> bool:
        """Whether a new sequence's `num_tokens` and the watermark are free.

        The watermark is for sequences that hold blocks already. While none does it isn't asked
        for: else a sequence as long as the pool could never start.
        """
        num_watermark_blocks = self.num_watermark_blocks if self._holders else 0
        return self.num_blocks_for(num_tokens) + num_watermark_blocks <= self.pool.num_free_blocks

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Append blocks until `num_tokens` tokens fit; False means no room, and no change."""
        num_new_blocks = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if num_new_blocks <= 0:
            return True
        block_ids = self.pool.allocate(num_new_blocks)
        if block_ids is None:
            return False
        seq.block_table.extend(block_ids)
        self._holders.add(seq)
        return True

    def release(self, seq: Sequence) -> None:
        """Give all blocks of `seq` back, tail first; nothing happens if it has none."""
        self.pool.free(reversed(seq.block_table))
        seq.block_table.clear()
        self._holders.discard(seq)

    def check_invariants(self) -> None:
        """Check that every held block is in as many tables as it has holders."""
        self.pool.check_invariants()
        uses = Counter(block_id for seq in self._holders for block_id in seq.block_table)
        for block_id in range(self.pool.num_blocks):
            assert uses[block_id] == self.pool.num_holders(block_id), f"block {block_id} leaks"
        for seq in self._holders:
            assert seq.block_table, f"{seq.request_id} is a holder without blocks"
            assert len(set(seq.block_table)) == len(seq.block_table), "a block twice in a table"
