"""Which steps become graphs, what is padded, and when graphs are given up; no device is needed."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import pytest
import torch

from engine.kvcache.storage import KVStorage
from engine.model import cuda_graphs
from engine.model.cuda_graphs import DecodeGraphs, bucket_of
from engine.model.inputs import ChunkInput, LoraStep, StepInputs
from punica_kernels.arena import Arena, ModuleSpec, Span
from punica_kernels.plan import build_plan
from tests.engine.model.fake_graphs import FakeGraph

MAX_NUM_SEQS = 12


class FakeTables:
    """Knows the longest context, and is as wide as the next power of two."""

    def __init__(self, longest: int, capacity: int) -> None:
        self.longest = longest
        self._capacity = capacity

    @property
    def shape(self) -> Hashable:
        return 1 << (self.longest - 1).bit_length(), self._capacity

    def take(self, other: "FakeTables") -> None:
        assert self.shape == other.shape
        self.longest = other.longest


@dataclass
class FakeStep:
    """What a step would read."""

    tables: FakeTables
    positions: torch.Tensor
    kv_slots: torch.Tensor


class FakeKernels:
    """Plans into FakeTables; `capacity` is that of the arena's tables."""

    capacity = 8

    def plan(self, inputs: StepInputs, kv: KVStorage, lora: LoraStep | None) -> FakeTables:
        self.planned_rows = None if lora is None else lora.plan.num_tokens
        return FakeTables(max(chunk.context_len for chunk in inputs.chunks), self.capacity)

    def step(self, plan, kv, lora, *, positions, kv_slots) -> FakeStep:
        return FakeStep(plan, positions, kv_slots)


class FakeDecoder:
    """Its hidden states are what it was given: token, position, slot, longest context."""

    def run(self, step: FakeStep, token_ids: torch.Tensor, lora: LoraStep | None) -> torch.Tensor:
        self.kv_slots = step.kv_slots.tolist()
        longest = torch.full_like(token_ids, step.tables.longest)
        return torch.stack((token_ids, step.positions, step.kv_slots, longest), dim=1).float()


class World:
    """Graphs over fakes, and how often they captured."""

    def __init__(self, capture: Callable[[Callable[[], torch.Tensor]], FakeGraph] = FakeGraph):
        self.kernels, self.decoder = FakeKernels(), FakeDecoder()
        self.graphs = DecodeGraphs(
            decoder=self.decoder,
            kernels=self.kernels,
            kv=KVStorage(
                num_layers=1,
                num_blocks=1,
                block_size=1,
                num_kv_heads=1,
                head_dim=1,
                dtype=torch.float32,
                device=torch.device("cpu"),
            ),
            max_num_seqs=MAX_NUM_SEQS,
            capture=capture,
        )

    def run(self, contexts: Sequence[int], lora: LoraStep | None = None) -> torch.Tensor | None:
        return self.graphs.forward(decode(contexts), lora)

    def is_right(self, contexts: Sequence[int], lora: LoraStep | None = None) -> bool:
        hidden = self.run(contexts, lora)
        return hidden is not None and torch.equal(hidden, expected(contexts))


def decode(contexts: Sequence[int], num_tokens: int = 1) -> StepInputs:
    """Return a step of chunks of equal length that have these contexts."""
    num_rows = len(contexts) * num_tokens
    return StepInputs(
        token_ids=torch.arange(num_rows) + 100,
        positions=torch.tensor([c - 1 for c in contexts for _ in range(num_tokens)]),
        kv_slots=torch.arange(num_rows) * 2,
        chunks=tuple(
            ChunkInput(row0=row, num_tokens=num_tokens, context_len=context, block_table=[0])
            for row, context in enumerate(contexts)
        ),
        sampled_rows=torch.arange(num_rows),
        begun_blocks=None,
    )


def expected(contexts: Sequence[int]) -> torch.Tensor:
    rows = [(100 + row, c - 1, 2 * row, max(contexts)) for row, c in enumerate(contexts)]
    return torch.tensor(rows, dtype=torch.float32)


def lora_step(num_rows: int, *, module: str) -> LoraStep:
    """Return a step whose first row carries an adapter of one module."""
    arena = Arena(
        modules=[ModuleSpec(name=module, group=module, in_features=2, slice_out_features=(2,))],
        num_layers=1,
        num_rows={module: 1},
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    tables = {module: [[1]]}
    arena.set_adapter(0, spans={module: Span(row0=0, num_rows=1)}, ranks=tables, scales=tables)
    plan = build_plan([0, None], [1, num_rows - 1])
    assert plan is not None
    return LoraStep(arena=arena, plan=plan)


def test_buckets_are_powers_of_two_up_to_all_sequences() -> None:
    buckets = [bucket_of(rows, max_num_seqs=12) for rows in (1, 2, 3, 4, 5, 8, 9, 12)]
    assert buckets == [1, 2, 4, 4, 8, 8, 12, 12]


def test_a_shape_is_captured_the_second_time_and_replayed_from_then_on() -> None:
    world = World()
    assert world.run([5, 6]) is None
    assert world.is_right([7, 8])
    assert (world.graphs.num_graphs, world.graphs.num_replays) == (1, 1)
    assert world.is_right([6, 5])
    assert (world.graphs.num_graphs, world.graphs.num_replays) == (1, 2)


def test_rows_of_an_earlier_step_become_padding_that_writes_nothing() -> None:
    world = World()
    assert world.run([5, 6, 7, 8]) is None
    assert world.is_right([5, 6, 7, 8])
    assert world.is_right([8, 8, 8])
    assert world.decoder.kv_slots == [0, 2, 4, -1]


def test_a_step_with_a_longer_chunk_or_too_many_rows_goes_the_ordinary_way() -> None:
    world = World()
    for _ in range(3):
        assert world.graphs.forward(decode([5, 6], num_tokens=2), None) is None
        assert world.run([5] * (MAX_NUM_SEQS + 1)) is None
    assert world.graphs.num_graphs == 0


def test_longer_contexts_and_grown_tables_have_graphs_of_their_own() -> None:
    """What a graph reads of tables that were replaced is stale: it isn't found any more."""
    world = World()
    for contexts, capacity in (([5], 8), ([9], 8), ([5], 16)):
        world.kernels.capacity = capacity
        assert world.run(contexts) is None
        assert world.is_right(contexts)
    assert world.graphs.num_graphs == 3


def test_adapters_are_planned_for_all_rows_of_the_bucket() -> None:
    world = World()
    assert world.run([5, 6, 7], lora_step(3, module="qkv")) is None
    assert world.kernels.planned_rows == 4
    assert world.is_right([5, 6, 7], lora_step(3, module="qkv"))


def test_an_adapter_of_the_embedding_goes_the_ordinary_way() -> None:
    world = World()
    for _ in range(3):
        assert world.run([5, 6], lora_step(2, module="embedding")) is None


def test_after_a_failed_capture_all_goes_the_ordinary_way_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(run: Callable[[], torch.Tensor]) -> FakeGraph:
        raise RuntimeError("operation not permitted when stream is capturing")

    world = World(fail)
    with caplog.at_level(logging.WARNING, logger="loraplex.model"):
        for _ in range(4):
            assert world.run([5, 6]) is None
    assert [record.message for record in caplog.records] == [
        "decode steps go on without CUDA graphs; a capture failed: "
        "operation not permitted when stream is capturing"
    ]


def test_the_least_recently_used_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_SHAPES", 2)
    world = World()
    for contexts in ([1], [2], [3, 3]):
        assert world.run(contexts) is None
    assert world.run([1]) is None
    assert world.is_right([3, 3])
