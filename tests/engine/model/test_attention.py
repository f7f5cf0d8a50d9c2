"""The paged attention path: nobody reads another's KV, and padding costs what it may cost."""

import random

import pytest
import torch

from engine.kvcache.storage import KVStorage
from engine.model.attention import (
    MAX_GATHER_ELEMENTS,
    MAX_PADDING_ELEMENTS,
    attend,
    plan_attention,
)
from engine.model.inputs import StepInputs, build_inputs
from engine.scheduler.plan import StepPlan
from tests.engine.model.paged_run import chunk_of, new_sequence

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 16, 4


def storage(num_blocks: int) -> KVStorage:
    return KVStorage(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def step(kv: KVStorage, chunks: list[tuple[int, int]]) -> tuple[StepInputs, list[list[int]]]:
    """Return inputs of chunks (num_earlier, num_tokens) over shuffled blocks, and the tables."""
    block_ids = list(range(kv.num_blocks))
    random.Random(3).shuffle(block_ids)
    parts, tables = [], []
    for index, (num_earlier, num_tokens) in enumerate(chunks):
        table = [block_ids.pop() for _ in range(-(-(num_earlier + num_tokens) // BLOCK_SIZE))]
        seq = new_sequence(str(index), [0] * (num_earlier + num_tokens), table)
        seq.num_computed_tokens = num_earlier
        parts.append(chunk_of(seq, num_tokens))
        tables.append(table)
    plan = StepPlan(chunks=tuple(parts))
    return build_inputs(plan, block_size=BLOCK_SIZE, device=torch.device("cpu")), tables


def expected(
    q: torch.Tensor, kv: KVStorage, inputs: StepInputs, tables: list[list[int]]
) -> torch.Tensor:
    """The definition: softmax over each row's own earlier slots, one row and head at a time."""
    out = torch.empty_like(q)
    for chunk, table in zip(inputs.chunks, tables, strict=True):
        k = kv.k[0, table].flatten(0, 1)
        v = kv.v[0, table].flatten(0, 1)
        for i in range(chunk.num_tokens):
            num_seen = chunk.context_len - chunk.num_tokens + i + 1
            for head in range(NUM_HEADS):
                kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
                scores = k[:num_seen, kv_head] @ q[chunk.row0 + i, head] / HEAD_DIM**0.5
                out[chunk.row0 + i, head] = scores.softmax(0) @ v[:num_seen, kv_head]
    return out.flatten(1)


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(0, 1), (3, 1), (4, 1), (30, 1)],
        [(5, 3), (9, 1), (0, 8), (2, 1), (0, 2)],
        [(40, 300), (7, 1)],
        [(0, 129), (0, 128), (1, 127)],
    ],
    ids=str,
)
def test_attention_is_its_definition(chunks: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    kv = storage(200)
    kv.k.normal_()
    kv.v.normal_()
    inputs, tables = step(kv, chunks)
    q = torch.randn(inputs.num_tokens, NUM_HEADS, HEAD_DIM)
    attended = attend(q, kv, 0, plan_attention(inputs.chunks, kv))
    assert torch.allclose(attended, expected(q, kv, inputs, tables), atol=1e-5)


def test_nan_in_other_sequences_blocks_reaches_nobody() -> None:
    """One adapter whose KV overflowed must not spoil its neighbours in a padded batch."""
    torch.manual_seed(0)
    kv = storage(60)
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    inputs, tables = step(kv, [(2, 1), (37, 1), (17, 1), (10, 6)])
    for table, chunk in zip(tables, inputs.chunks, strict=True):
        for tensor in (kv.k, kv.v):
            rows = torch.zeros(len(table) * BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
            rows[: chunk.context_len].normal_()
            tensor[0, table] = rows.view(len(table), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    kv.v[0, tables[1]] = torch.nan
    q = torch.randn(inputs.num_tokens, NUM_HEADS, HEAD_DIM)
    attended = attend(q, kv, 0, plan_attention(inputs.chunks, kv))
    is_nan = attended.isnan().any(dim=1)
    assert is_nan.tolist() == [False, True, False] + [False] * 6


def test_a_block_is_wiped_when_it_is_begun_and_not_filled() -> None:
    kv = storage(40)
    inputs, tables = step(kv, [(0, 3), (0, 4), (3, 1), (4, 1), (5, 2), (1, 9)])
    assert inputs.begun_blocks is not None
    assert inputs.begun_blocks.tolist() == [tables[0][0], tables[3][1], tables[5][2]]
    inputs, _ = step(kv, [(0, 4), (1, 1)])
    assert inputs.begun_blocks is None


def test_every_slot_is_the_blocks_and_the_offsets() -> None:
    kv = storage(40)
    inputs, tables = step(kv, [(3, 6), (8, 1)])
    expected_slots = [tables[0][p // 4] * 4 + p % 4 for p in range(3, 9)] + [tables[1][2] * 4]
    assert inputs.kv_slots.tolist() == expected_slots
    assert inputs.positions.tolist() == [3, 4, 5, 6, 7, 8, 8]
    assert inputs.sampled_rows.tolist() == [5, 6]


def test_decode_groups_keep_their_bounds_and_cover_every_row_once() -> None:
    lengths = [1, 5, 700, 9000, 40_000, 60_000, 3, 61_000, 200, 8] * 3
    kv = storage(sum(-(-length // BLOCK_SIZE) for length in lengths))
    inputs, _ = step(kv, [(length - 1, 1) for length in lengths])
    plan = plan_attention(inputs.chunks, kv)
    rows: list[int] = []
    for group in plan.groups:
        num_seqs, num_blocks = group.block_ids.shape
        elements = num_seqs * num_blocks * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        assert elements <= MAX_GATHER_ELEMENTS or num_seqs == 1
        own = (
            list(range(inputs.num_tokens))[group.rows]
            if isinstance(group.rows, slice)
            else (group.rows.tolist())
        )
        shortest = min(inputs.chunks[row].context_len for row in own)
        padding = (num_blocks * BLOCK_SIZE - shortest) * NUM_KV_HEADS * HEAD_DIM
        assert padding <= MAX_PADDING_ELEMENTS + BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
        rows += own
    assert sorted(rows) == list(range(len(lengths)))
    assert len(plan.groups) < len(lengths) / 2
