"""Tiles of long chunks and long segments: everything once, shared out among threads."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.cpu_lora import plan_lora_segments, plan_lora_tiles
from engine.model.inputs import ChunkInput
from engine.model.prefill_tiles import plan_prefill_tiles
from engine.model.shares import balanced_starts
from punica_kernels import numba_prefill, numba_sgmv
from punica_kernels.plan import Segment

threads = st.integers(1, 8)


def chunks_of(lengths: list[tuple[int, int]]) -> list[ChunkInput]:
    """Return chunks of (tokens now, tokens before), one after another."""
    row0, chunks = 0, []
    for number, (num_tokens, num_earlier) in enumerate(lengths):
        context = num_tokens + num_earlier
        table = tuple(range(100 * number, 100 * number + -(-context // 16)))
        chunks.append(
            ChunkInput(row0=row0, num_tokens=num_tokens, context_len=context, block_table=table)
        )
        row0 += num_tokens
    return chunks


@given(
    lengths=st.lists(st.tuples(st.integers(17, 300), st.integers(0, 500)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 4),
    num_threads=threads,
)
def test_each_row_attends_once_for_each_head_to_its_own_past(lengths, num_kv_heads, num_threads):
    chunks = chunks_of(lengths)
    plan = plan_prefill_tiles(chunks, num_kv_heads=num_kv_heads, num_threads=num_threads)
    seen = {}
    for row0, num_rows, table, num_earlier, kv_head in plan.tiles.tolist():
        assert 0 < num_rows <= numba_prefill.MAX_TILE_ROWS
        for i in range(num_rows):
            assert (row0 + i, kv_head) not in seen
            seen[row0 + i, kv_head] = (table, num_earlier + i)
    expected = {
        (chunk.row0 + i, kv_head): (table, chunk.context_len - chunk.num_tokens + i)
        for table, chunk in enumerate(chunks)
        for i in range(chunk.num_tokens)
        for kv_head in range(num_kv_heads)
    }
    assert seen == expected
    for line, chunk in zip(plan.block_tables.tolist(), chunks, strict=True):
        assert tuple(line[: len(chunk.block_table)]) == chunk.block_table
    assert plan.tile_starts[0] == 0
    assert plan.tile_starts[-1] == len(plan.tiles)
    assert len(plan.tile_starts) <= num_threads + 1


@given(
    runs=st.lists(st.tuples(st.integers(9, 400), st.integers(0, 3), st.integers(0, 5)), max_size=5),
    num_threads=threads,
)
def test_each_token_of_a_long_segment_is_in_one_tile_of_its_adapter(runs, num_threads):
    segments, start = [], 0
    for num_tokens, gap, lora_index in runs:
        start += gap
        segments.append(Segment(start=start, num_tokens=num_tokens, lora_index=lora_index))
        start += num_tokens
    owners = {}
    for first, num_tokens, lora_index in plan_lora_tiles(segments, num_threads=num_threads):
        assert 0 < num_tokens <= numba_sgmv.MAX_TILE_ROWS
        for token in range(first, first + num_tokens):
            assert token not in owners
            owners[token] = lora_index
    assert owners == {
        token: one.lora_index for one in segments for token in range(one.start, one.stop)
    }


@given(lengths=st.lists(st.integers(1, 8), max_size=5), num_threads=threads)
def test_short_segments_are_cut_only_where_threads_would_have_none(lengths, num_threads):
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    segments = [
        Segment(start=start, num_tokens=length, lora_index=place)
        for place, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    parts = plan_lora_segments(segments, num_threads=num_threads).tolist()
    owners = [owner for _, length, owner in parts for _ in range(length)]
    assert owners == [one.lora_index for one in segments for _ in range(one.num_tokens)]
    assert [start for start, _, _ in parts] == [
        sum(length for _, length, _ in parts[:place]) for place in range(len(parts))
    ]
    if 2 * len(segments) > num_threads:
        assert len(parts) == len(segments)
    elif lengths and min(lengths) >= 2 * num_threads:
        assert len(parts) == len(segments) * (num_threads // len(segments))


@pytest.mark.parametrize(("num_tokens", "num_threads"), [(128, 2), (256, 2), (300, 2), (512, 4)])
def test_tiles_of_a_long_segment_load_the_threads_alike(num_tokens: int, num_threads: int):
    segment = Segment(start=0, num_tokens=num_tokens, lora_index=0)
    heights = plan_lora_tiles([segment], num_threads=num_threads)[:, 1]
    starts = balanced_starts(heights, num_threads)
    loads = [int(heights[start:stop].sum()) for start, stop in itertools.pairwise(starts)]
    assert len(loads) == num_threads
    assert max(loads) <= 1.05 * num_tokens / num_threads


def test_few_rows_are_shared_out_among_many_threads():
    chunks = chunks_of([(64, 8000)])
    plan = plan_prefill_tiles(chunks, num_kv_heads=1, num_threads=4)
    assert plan.tile_starts.tolist() == [0, 1, 2, 3, 4]
