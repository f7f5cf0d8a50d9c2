"""The units of a step cover every row's keys once, in balanced runs."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.model.attention_units import (
    MAX_ROWS_BY_KERNEL,
    MIN_KEYS_OF_PART,
    balanced_starts,
    plan_units,
)
from engine.model.inputs import ChunkInput
from punica_kernels.numba_attention import WHOLE_ROW

BLOCK_SIZE = 4


def chunks_of(extents: list[tuple[int, int]]) -> list[ChunkInput]:
    """Return chunks of (tokens computed earlier, tokens now)."""
    chunks, row0, block = [], 0, 0
    for num_earlier, num_tokens in extents:
        context = num_earlier + num_tokens
        num_blocks = -(-context // BLOCK_SIZE)
        table = range(block, block + num_blocks)
        chunks.append(
            ChunkInput(
                row0=row0, num_tokens=num_tokens, context_len=context, block_table=list(table)
            )
        )
        row0, block = row0 + num_tokens, block + num_blocks
    return chunks


extents = st.lists(
    st.tuples(st.integers(0, 2000), st.sampled_from([1, 1, 1, 2, 16, 17, 100])), max_size=12
)


@given(extents=extents, num_threads=st.integers(1, 8))
def test_every_key_of_every_row_is_in_one_unit(extents, num_threads):
    chunks = chunks_of(extents)
    plan = plan_units(chunks, num_threads=num_threads)
    seen: dict[int, list[tuple[int, int]]] = {}
    table_of: dict[int, list[int]] = {}
    for row, table, first, stop, _, _ in plan.units.tolist():
        seen.setdefault(row, []).append((first, stop))
        assert first < stop
        table_of[row] = plan.block_tables[table].tolist()
    for chunk in chunks:
        is_long = chunk.num_tokens > MAX_ROWS_BY_KERNEL
        assert (chunk in plan.long_chunks) == is_long
        for i in range(chunk.num_tokens):
            num_keys = chunk.context_len - chunk.num_tokens + i + 1
            parts = seen.pop(chunk.row0 + i, [])
            if not is_long:
                blocks = list(chunk.block_table)
                assert table_of[chunk.row0 + i][: len(blocks)] == blocks
            edges = [0] + [stop for _, stop in parts] if parts else []
            assert [first for first, _ in parts] == edges[:-1]
            assert (edges[-1:] == [num_keys]) != is_long
    assert seen == {}


@given(extents=extents, num_threads=st.integers(1, 8))
def test_a_row_is_turned_by_its_own_unit_or_before_and_never_twice(extents, num_threads):
    chunks = chunks_of(extents)
    plan = plan_units(chunks, num_threads=num_threads)
    fresh = [row for row, _, _, _, is_fresh, _ in plan.units.tolist() if is_fresh]
    rows = sum(chunk.num_tokens for chunk in chunks)
    assert sorted(fresh + plan.turned_rows.tolist()) == list(range(rows))


@given(extents=extents, num_threads=st.integers(1, 8))
def test_parts_of_a_row_are_joined_in_order(extents, num_threads):
    plan = plan_units(chunks_of(extents), num_threads=num_threads)
    partials = {row: [] for row, _, _ in plan.joins.tolist()}
    for row, _, first, stop, _, partial in plan.units.tolist():
        if partial != WHOLE_ROW:
            partials[row].append(partial)
            assert stop - first >= MIN_KEYS_OF_PART // 2
    for row, first, count in plan.joins.tolist():
        assert partials[row] == list(range(first, first + count))
        assert count > 1
    assert sum(len(found) for found in partials.values()) == plan.num_partials


def test_few_rows_with_long_contexts_are_divided_among_the_threads():
    assert len(plan_units(chunks_of([(2000, 1)]), num_threads=4).units) == 4
    assert len(plan_units(chunks_of([(2000, 1)] * 4), num_threads=4).units) == 4
    assert len(plan_units(chunks_of([(20, 1)]), num_threads=4).units) == 1


@given(costs=st.lists(st.integers(1, 1000), max_size=40), num_threads=st.integers(1, 8))
def test_threads_get_consecutive_runs_of_about_equal_cost(costs, num_threads):
    starts = balanced_starts(np.array(costs, dtype=np.int64), num_threads)
    assert starts[0] == 0
    assert starts[-1] == len(costs)
    assert len(starts) - 1 == min(num_threads, len(costs))
    assert (np.diff(starts) >= 0).all()
    heaviest = max((sum(costs[a:b]) for a, b in itertools.pairwise(starts)), default=0)
    assert heaviest <= sum(costs) / max(1, min(num_threads, len(costs))) + max(costs, default=0)
