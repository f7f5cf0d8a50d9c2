"""Which blocks are free, and how many hold each of the others."""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Hands block ids out and takes them back. Only CacheManager calls it.

    A block with a count of zero is in the free list, which is kept in eviction order: the block
    that has been free for longest is handed out first, but those without worth before all others.
    Holds no tensors.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._num_holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def num_holders(self, block_id: int) -> int:
        """Return how often `block_id` was handed out or shared and not yet freed."""
        return self._num_holders[block_id]

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hold the first `num_blocks` of the free list, or return None and change nothing."""
        if num_blocks > len(self._free):
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in block_ids:
            self._num_holders[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold each block once more; a free one leaves the free list, wherever it is in it."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._num_holders[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Let go of each block once, in this order: the first is the first to be reused.

        Give a sequence's blocks tail first, so that its beginning stays findable for longest.
        """
        for block_id in block_ids:
            assert self._num_holders[block_id] > 0, f"block {block_id} is free already"
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                self._free[block_id] = None

    def free_worthless(self, block_ids: Iterable[int]) -> None:
        """Let go of each block once; what nobody else holds is reused before anything else."""
        for block_id in block_ids:
            self.free((block_id,))
            if block_id in self._free:
                self._free.move_to_end(block_id, last=False)

    def check_invariants(self) -> None:
        """Check that a block is in the free list exactly if nobody holds it."""
        free = {block_id for block_id, held in enumerate(self._num_holders) if held == 0}
        assert free == set(self._free), "the free list and the counts disagree"
        assert min(self._num_holders) >= 0, "a block is held less than never"
