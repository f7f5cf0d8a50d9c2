"""The tensors behind the KV blocks; who owns which block is BlockPool's business."""

import torch

from punica_kernels.lazy_zeros import lazy_zeros


class KVStorage:
    """K and V of every block of every layer, [num_layers, num_blocks, block_size, kv_heads, dim].

    Starts as zeros, and a block is wiped when it is begun but not filled in one step. So a slot
    that lies in some sequence's block table, but isn't written yet, is zero: attention may gather
    and mask it without meeting what an earlier owner left there, NaN least of all.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.k = lazy_zeros(shape, dtype=dtype, device=device)
        self.v = lazy_zeros(shape, dtype=dtype, device=device)
        # Views of the same memory, made once: [num_blocks, block_size * kv_heads * dim] for
        # gathering whole blocks, [num_blocks * block_size, kv_heads, dim] for writing slots.
        self._k_blocks = list(self.k.view(num_layers, num_blocks, -1))
        self._v_blocks = list(self.v.view(num_layers, num_blocks, -1))
        self._k_slots = list(self.k.view(num_layers, -1, num_kv_heads, head_dim))
        self._v_slots = list(self.v.view(num_layers, -1, num_kv_heads, head_dim))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V together."""
        return (self.k.nbytes + self.v.nbytes) // self.num_blocks

    def write(self, layer: int, kv_slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k and v [num_tokens, num_kv_heads, head_dim] into their slots [num_tokens]."""
        self._k_slots[layer].index_copy_(0, kv_slots, k)
        self._v_slots[layer].index_copy_(0, kv_slots, v)

    def gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V of `block_ids` [num_seqs, num_blocks].

        Each is [num_seqs, num_blocks * block_size, num_kv_heads, head_dim].
        """
        shape = (block_ids.shape[0], -1, self.num_kv_heads, self.head_dim)
        flat = block_ids.view(-1)
        k = self._k_blocks[layer].index_select(0, flat).view(shape)
        v = self._v_blocks[layer].index_select(0, flat).view(shape)
        return k, v

    def copy_block(self, *, source: int, target: int) -> None:
        """Make block `target` what block `source` is now, in every layer."""
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]

    def wipe(self, block_ids: torch.Tensor) -> None:
        """Zero `block_ids` [num_blocks] in every layer."""
        self.k.index_fill_(1, block_ids, 0)
        self.v.index_fill_(1, block_ids, 0)
