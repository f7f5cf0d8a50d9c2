"""FlashInfer's page table lists the same rows and cells as the engine's block tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.inputs import slots_of
from punica_kernels.page_table import page_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    row0: int
    num_tokens: int
    context_len: int
    block_table: Sequence[int]


def chunks_of(*lengths: tuple[int, int, Sequence[int]]) -> list[Chunk]:
    """Return chunks of (num_tokens, context_len, block_table), one behind the other."""
    chunks, row0 = [], 0
    for num_tokens, context_len, block_table in lengths:
        chunks.append(
            Chunk(
                row0=row0, num_tokens=num_tokens, context_len=context_len, block_table=block_table
            )
        )
        row0 += num_tokens
    return chunks


def test_a_step_of_a_decode_a_prompt_and_the_rest_of_one() -> None:
    table = page_table(
        chunks_of((1, 33, [7, 2, 9]), (5, 5, [4]), (3, 32, [0, 1])),
        block_size=16,
    )
    assert table.qo_indptr.tolist() == [0, 1, 6, 9]
    assert table.kv_indptr.tolist() == [0, 3, 4, 6]
    assert table.kv_indices.tolist() == [7, 2, 9, 4, 0, 1]
    assert table.last_page_len.tolist() == [1, 5, 16]
    for array in (table.qo_indptr, table.kv_indptr, table.kv_indices, table.last_page_len):
        assert array.dtype == np.int32


def test_blocks_behind_a_chunks_context_are_left_out() -> None:
    table = page_table(chunks_of((2, 4, [5, 6, 7]), (1, 5, [3, 8, 1])), block_size=4)
    assert table.kv_indices.tolist() == [5, 3, 8]
    assert table.last_page_len.tolist() == [4, 1]


def test_chunks_that_leave_rows_out_and_tables_that_are_short_are_errors() -> None:
    chunks = chunks_of((2, 4, [5]), (1, 5, [3, 8]))
    with pytest.raises(AssertionError, match="cover all rows"):
        page_table(chunks[1:], block_size=4)
    with pytest.raises(AssertionError, match="covers its chunk's context"):
        page_table(chunks_of((1, 9, [3, 8])), block_size=4)


@given(st.data(), st.integers(1, 16))
def test_every_row_sees_the_slots_of_its_sequence_up_to_itself(
    data: st.DataObject, block_size: int
) -> None:
    lengths = []
    for _ in range(data.draw(st.integers(1, 5))):
        context_len = data.draw(st.integers(1, 40))
        num_blocks = -(-context_len // block_size) + data.draw(st.integers(0, 2))
        block_table = data.draw(
            st.lists(st.integers(0, 99), min_size=num_blocks, max_size=num_blocks)
        )
        lengths.append((data.draw(st.integers(1, context_len)), context_len, block_table))
    chunks = chunks_of(*lengths)
    table = page_table(chunks, block_size=block_size)
    assert len(table.last_page_len) == len(chunks)
    for i, chunk in enumerate(chunks):
        row0, row_stop = table.qo_indptr[i : i + 2]
        assert (row0, row_stop) == (chunk.row0, chunk.row0 + chunk.num_tokens)
        pages = table.kv_indices[table.kv_indptr[i] : table.kv_indptr[i + 1]]
        kv_len = (len(pages) - 1) * block_size + int(table.last_page_len[i])
        slots = [page * block_size + offset for page in pages for offset in range(block_size)]
        for row in range(row0, row_stop):
            num_seen = kv_len - (row_stop - row0) + (row - row0) + 1  # causal, aligned to the end
            position = chunk.context_len - chunk.num_tokens + row - row0
            seen = slots_of(chunk.block_table, 0, position + 1, block_size=block_size)
            assert slots[:num_seen] == seen
