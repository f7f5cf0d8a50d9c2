"""Rows reach the arena in small portions, and nothing half loaded can run."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.lora.arena_allocator import ArenaAllocator, Move
from engine.lora.arena_image import ImageBroken
from engine.lora.residency import AdapterResidency, Lease
from engine.lora.row_space import GroupMove
from engine.lora.weights import ArenaWriter, RowCopies
from punica_kernels.arena import Arena
from punica_kernels.dispatch import add_lora
from punica_kernels.plan import build_plan
from tests.adapters.worlds import NUM_LAYERS
from tests.engine.lora.worlds import (
    MODULES,
    PLACES,
    delta,
    image_of,
    peft_folder,
    pending_load,
    tiny_arena,
)

RANKS = {"q_proj": 4, "v_proj": 2, "gate_proj": 3, "up_proj": 3, "down_proj": 1}
SPANS = {"attention": (3, 4), "mlp": (7, 3)}


def assert_adds(
    arena: Arena,
    lora_index: int,
    ranks: dict[str, int],
    *,
    seed: int = 0,
    layers: Iterable[int] = range(NUM_LAYERS),
) -> None:
    """The adapter at lora_index adds PEFT's sum, in every module of these layers."""
    plan = build_plan([lora_index], [3])
    assert plan is not None
    for layer in layers:
        for module in MODULES:
            x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(layer))
            y = torch.zeros(3, module.out_features)
            add_lora(y, x, arena=arena, module=module.name, layer=layer, plan=plan)
            expected = delta(x, ranks, module=module, layer=layer, seed=seed)
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


class LateCopies:
    """Copies when steps would wait for it, and not before: the most that a stream may do.

    follows   whether the copies since then come behind all that steps were given to do
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.follows = False

    def follow_steps(self) -> None:
        self.follows = True

    def copy(self, place: torch.Tensor, rows: torch.Tensor) -> None:
        assert self.follows, "a step may still read what is written over"
        self._waiting.append((place, rows))

    def precede_steps(self) -> None:
        for place, rows in self._waiting:
            place.copy_(rows)
        self._waiting.clear()
        self.follows = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)


def test_tables_are_set_behind_copies_that_are_late(tmp_path: Path) -> None:
    image = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    arena, copies = tiny_arena(), LateCopies()
    writer = ArenaWriter(arena, copies)
    writer.begin(pending_load(image, SPANS, lora_index=5))
    assert not writer.copy_some(1000)
    assert copies.num_waiting > 0
    assert num_written(arena) == 0
    while not writer.copy_some(1000):
        pass
    assert copies.num_waiting == 0
    assert_adds(arena, 5, RANKS)


def test_late_copies_of_a_cancelled_load_never_reach_rows_that_were_moved(tmp_path: Path) -> None:
    image = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    other = image_of(peft_folder(tmp_path / "other", RANKS, seed=1), tmp_path / "b.arena")
    arena = tiny_arena()
    writer = ArenaWriter(arena, LateCopies())
    moved = {"attention": (8, 4), "mlp": (8, 3)}
    writer.begin(pending_load(image, moved, lora_index=1))
    while not writer.copy_some(10**6):
        pass
    writer.begin(pending_load(other, {"attention": (0, 4), "mlp": (0, 3)}, lora_index=2))
    assert not writer.copy_some(1000)
    writer.cancel()
    moves = tuple(
        GroupMove(group=group, move=Move(src_row0=row0, dst_row0=0, num_rows=num_rows))
        for group, (row0, num_rows) in moved.items()
    )
    load = pending_load(image, {"attention": (10, 4), "mlp": (10, 3)}, lora_index=3)
    writer.begin(replace(load, moves=moves))
    while not writer.copy_some(1000):
        pass
    assert_adds(arena, 1, RANKS)
    assert_adds(arena, 3, RANKS)


@pytest.mark.parametrize("max_bytes", [1, 200, 1000, 10**9])
def test_an_adapter_arrives_whole_whatever_the_portions(tmp_path: Path, max_bytes: int) -> None:
    image = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    arena = tiny_arena()
    writer = ArenaWriter(arena)
    writer.begin(pending_load(image, SPANS, lora_index=5))
    num_portions = 1
    while not writer.copy_some(max_bytes):
        num_portions += 1
        with pytest.raises(KeyError):
            arena.weights("qkv", 0, 5)
    assert_adds(arena, 5, RANKS)
    assert (num_portions == 1) == (max_bytes == 10**9)


def test_no_portion_is_larger_than_was_allowed(tmp_path: Path) -> None:
    """Counted as rows that stop being NaN."""
    image = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    arena = tiny_arena()
    writer = ArenaWriter(arena)
    writer.begin(pending_load(image, SPANS))
    before = num_written(arena)
    done = False
    while not done:
        done = writer.copy_some(800)
        after = num_written(arena)
        assert 0 < (after - before) * 4 <= 800
        before = after


def num_written(arena: Arena) -> int:
    tensors = [
        tensor for module in MODULES for tensor in (arena.a(module.name), arena.b(module.name))
    ]
    return sum(int((~tensor.isnan()).sum()) for tensor in tensors)


def test_a_cancelled_load_leaves_the_writer_free(tmp_path: Path) -> None:
    image = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    arena = tiny_arena()
    writer = ArenaWriter(arena)
    writer.begin(pending_load(image, SPANS, lora_index=1))
    assert not writer.copy_some(1)
    writer.cancel()
    writer.begin(pending_load(image, SPANS, lora_index=2))
    while not writer.copy_some(10**6):
        pass
    assert_adds(arena, 2, RANKS)


def test_an_image_that_does_not_fit_is_broken_and_nothing_is_under_way(tmp_path: Path) -> None:
    image = image_of(peft_folder(tmp_path / "adapter", RANKS), tmp_path / "a.arena")
    arena = tiny_arena()
    writer = ArenaWriter(arena)
    for load in (
        pending_load(tmp_path / "absent.arena", SPANS),
        pending_load(image, {"attention": (0, 4)}),
        pending_load(image, {"attention": (0, 3), "mlp": (0, 3)}),
    ):
        with pytest.raises(ImageBroken):
            writer.begin(load)
    bf16 = ArenaWriter(tiny_arena(dtype=torch.bfloat16))
    with pytest.raises(ImageBroken, match="float32"):
        bf16.begin(pending_load(image, SPANS))
    writer.begin(pending_load(image, SPANS))


BANK: tuple[dict[str, int], ...] = (
    {"q_proj": 4, "v_proj": 2},
    dict.fromkeys(PLACES, 3),
    {"gate_proj": 6, "up_proj": 6, "down_proj": 2},
    {"k_proj": 5, "o_proj": 1, "down_proj": 4},
    {"q_proj": 2, "k_proj": 2, "v_proj": 2},
    {"o_proj": 6, "up_proj": 1},
)
TARGETS = {
    "attention": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj"},
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One image for each adapter of the bank; the seed is its number."""
    home = tmp_path_factory.mktemp("bank")
    return [
        image_of(peft_folder(home / str(seed), ranks, seed=seed), home / f"{seed}.arena")
        for seed, ranks in enumerate(BANK)
    ]


class Worker:
    """Residency and arena together, as the core drives them."""

    def __init__(
        self, images: list[Path], *, num_rows: int, copies: RowCopies | None = None
    ) -> None:
        self.arena = tiny_arena(num_rows=num_rows)
        self.writer = ArenaWriter(self.arena, copies)
        allocator = {group: ArenaAllocator(num_rows) for group in TARGETS}
        clock = iter(range(10**6)).__next__
        self.residency = AdapterResidency(allocator=allocator, clock=clock)
        self.num_moves = 0
        for number, (image, ranks) in enumerate(zip(images, BANK, strict=True)):
            rows = {
                group: max((ranks.get(target, 0) for target in targets), default=0)
                for group, targets in TARGETS.items()
            }
            self.residency.add(
                str(number),
                content_digest=f"sha256:{number}",
                image=image,
                num_rows=rows,
                max_rank=max(ranks.values()),
            )

    def lease(self, number: int) -> Lease | None:
        """Queue a request for one adapter, and admit it if rows could be had."""
        self.residency.claim(str(number))
        pending = self.residency.next_load()
        if pending is not None:
            self.num_moves += len(pending.moves)
            self.writer.begin(pending)
            while not self.writer.copy_some(500):
                pass
            self.residency.loaded(pending.lora_id)
        self.residency.unclaim(str(number))
        return self.residency.lease(str(number))


@given(
    uses=st.lists(st.tuples(st.integers(0, len(BANK) - 1), st.booleans()), max_size=14),
    late=st.booleans(),
)
def test_whatever_is_evicted_or_moved_every_leased_adapter_adds_its_own_sum(
    images: list[Path], uses: list[tuple[int, bool]], late: bool
) -> None:
    """The arena has room for two or three; some stay leased, so that rows move under them."""
    worker = Worker(images, num_rows=10, copies=LateCopies() if late else None)
    held: dict[int, Lease] = {}
    for number, keep in uses:
        lease = worker.lease(number)
        if number in held:
            worker.residency.release(held.pop(number))
        if lease is not None:
            held[number] = lease
        for other, other_lease in held.items():
            assert_adds(worker.arena, other_lease.lora_index, BANK[other], seed=other, layers=[1])
        if lease is not None and not keep:
            worker.residency.release(held.pop(number))
        worker.residency.check_invariants()


def test_a_leased_adapter_adds_its_own_sum_after_it_was_moved(images: list[Path]) -> None:
    worker = Worker(images, num_rows=10)
    first, second = worker.lease(0), worker.lease(1)
    assert first is not None
    assert second is not None
    assert_adds(worker.arena, second.lora_index, BANK[1], seed=1)
    worker.residency.release(first)
    third = worker.lease(5)
    assert third is not None
    assert worker.num_moves == 1
    assert_adds(worker.arena, second.lora_index, BANK[1], seed=1)
    assert_adds(worker.arena, third.lora_index, BANK[5], seed=5)
