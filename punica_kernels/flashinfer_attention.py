"""Attention by FlashInfer's kernels instead of ours; written against version 0.7.4 of its API.

Importing this needs no FlashInfer: whoever found it hands its wrapper in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from punica_kernels.attention_chunk import AttentionChunk
from punica_kernels.page_table import page_table

# flashinfer.BatchPrefillWithPagedKVCacheWrapper, or what has its contract.
Wrapper = Callable[..., Any]

_WORKSPACE_BYTES = 128 << 20  # of zeros: what its documentation recommends


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What an attention kernel is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferPlan:
    """A planned step; it ends when the next one is planned, since the wrapper keeps one plan."""

    wrapper: Any
    block_size: int

    def attend(self, q: Tensor, *, k: Tensor, v: Tensor) -> Tensor:
        """Return softmax(q Kᵀ / √head_dim) V of each row over its own sequence's context.

        q       [num_tokens, num_heads, head_dim]; rows may be wider than their heads
        k, v    [num_blocks, block_size, num_kv_heads, head_dim], a layer's; the step's own K and V
                are in already
        returns as q, contiguous
        """
        assert k.shape[1] == v.shape[1] == self.block_size, "cells are as planned"
        rows = q.contiguous()  # its documentation promises nothing for wider rows
        out = torch.empty_like(rows)
        self.wrapper.run(rows, (k, v), out=out)
        return out


class FlashInferAttention:
    """Plans steps of chunks of any length, those of one token included."""

    def __init__(
        self, make_wrapper: Wrapper, *, shape: AttentionShape, device: torch.device
    ) -> None:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = make_wrapper(workspace, kv_layout="NHD")
        self._shape = shape

    def plan(self, chunks: Sequence[AttentionChunk]) -> FlashInferPlan:
        """Plan a step, for all its layers; the host makes the plan and the device gets a copy."""
        shape = self._shape
        table = page_table(chunks, block_size=shape.block_size)
        self._wrapper.plan(
            qo_indptr=torch.from_numpy(table.qo_indptr),
            paged_kv_indptr=torch.from_numpy(table.kv_indptr),
            paged_kv_indices=torch.from_numpy(table.kv_indices),
            paged_kv_last_page_len=torch.from_numpy(table.last_page_len),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim_qk=shape.head_dim,
            page_size=shape.block_size,
            causal=True,
            sm_scale=shape.head_dim**-0.5,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        return FlashInferPlan(wrapper=self._wrapper, block_size=shape.block_size)
