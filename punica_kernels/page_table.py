"""A step's chunks as FlashInfer reads them: ragged rows over ragged lists of pages.

A page is what is called a block everywhere else here; a request is a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from punica_kernels.attention_chunk import AttentionChunk

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """The four arrays of FlashInfer's page table, int32, in the order of the chunks.

    qo_indptr        [num_seqs + 1]   request i has the query rows qo_indptr[i] … qo_indptr[i + 1]
    kv_indptr        [num_seqs + 1]   and the pages kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
    kv_indices       [num_pages]      block ids, each request's in the order of its tokens
    last_page_len    [num_seqs]       tokens in a request's last page, 1 … block_size

    With causal=True the last query row of a request sees all its tokens, each earlier row one
    fewer: what a chunk's rows see.
    """

    qo_indptr: Array
    kv_indptr: Array
    kv_indices: Array
    last_page_len: Array


def page_table(chunks: Sequence[AttentionChunk], *, block_size: int) -> PageTable:
    """List the rows and pages of a step; blocks behind a chunk's context are left out."""
    row_stops = list(accumulate(chunk.num_tokens for chunk in chunks))
    assert [chunk.row0 for chunk in chunks] == [0, *row_stops[:-1]], (
        "chunks cover all rows in order"
    )
    num_pages = [-(-chunk.context_len // block_size) for chunk in chunks]
    kv_indices = [
        block_id
        for chunk, count in zip(chunks, num_pages, strict=True)
        for block_id in chunk.block_table[:count]
    ]
    kv_indptr = [0, *accumulate(num_pages)]
    assert len(kv_indices) == kv_indptr[-1], "a block table covers its chunk's context"
    return PageTable(
        qo_indptr=_int32([0, *row_stops]),
        kv_indptr=_int32(kv_indptr),
        kv_indices=_int32(kv_indices),
        last_page_len=_int32([(chunk.context_len - 1) % block_size + 1 for chunk in chunks]),
    )


def _int32(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int32)
