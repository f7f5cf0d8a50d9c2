"""Rows can be moved, tables swapped, and nothing costs memory before it is written."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from punica_kernels.arena import Arena, ModuleSpec, Span
from tests.punica_kernels.worlds import (
    CPU,
    MODULES,
    NUM_LAYERS,
    NUM_ROWS,
    TinyAdapter,
    place,
    poisoned_arena,
    tiny_adapters,
)


def assert_holds(arena: Arena, lora_index: int, adapter: TinyAdapter) -> None:
    """Every slice's views are exactly the adapter's factors."""
    for module in MODULES:
        for layer in range(NUM_LAYERS):
            slices = {
                one.slice_index: one for one in arena.weights(module.name, layer, lora_index).slices
            }
            for index, rank in enumerate(adapter.ranks[module.name][layer]):
                assert (index in slices) == (rank > 0)
                if rank > 0:
                    a, b = adapter.factors(module.name, layer, index)
                    assert torch.equal(slices[index].a_t.T, a)
                    assert torch.equal(slices[index].b, b)
                    assert slices[index].scale == adapter.scale(layer, index)


@given(
    adapter=tiny_adapters(max_rank=6),
    start=st.integers(0, NUM_ROWS - 6),
    end=st.integers(0, NUM_ROWS - 6),
)
def test_moved_rows_are_the_same_rows(adapter: TinyAdapter, start: int, end: int) -> None:
    """Up, down, by less than the span's own width, or not at all."""
    arena = poisoned_arena()
    place(arena, 0, adapter, {"attention": start, "mlp": 1})
    assert_holds(arena, 0, adapter)
    arena.move("attention", Span(row0=start, num_rows=adapter.num_rows("attention")), end)
    assert arena.spans(0)["attention"].row0 == end
    assert arena.spans(0)["mlp"].row0 == 1
    assert_holds(arena, 0, adapter)


def uniform(rank: int, seed: int) -> TinyAdapter:
    ranks = {
        module.name: [[rank] * module.num_slices for _ in range(NUM_LAYERS)] for module in MODULES
    }
    return TinyAdapter(ranks=ranks, seed=seed)


def test_a_move_leaves_the_neighbours_alone() -> None:
    arena = poisoned_arena()
    adapters = [uniform(4, 1), uniform(3, 2), uniform(5, 3)]
    for index, (adapter, row0) in enumerate(zip(adapters, (0, 6, 12), strict=True)):
        place(arena, index, adapter, {"attention": row0, "mlp": row0})
    arena.move("attention", Span(row0=6, num_rows=3), 4)
    arena.move("attention", Span(row0=12, num_rows=5), 7)
    for index, adapter in enumerate(adapters):
        assert_holds(arena, index, adapter)


def test_a_swap_changes_what_an_index_means_at_once() -> None:
    """Views that were cut for the old adapter must not outlive it."""
    arena = poisoned_arena()
    old, new = uniform(4, 1), uniform(2, 2)
    place(arena, 0, old, {"attention": 0, "mlp": 0})
    assert_holds(arena, 0, old)
    place(arena, 0, new, {"attention": 10, "mlp": 4})
    assert_holds(arena, 0, new)
    arena.clear_adapter(0)
    with pytest.raises(KeyError):
        arena.weights("qkv", 0, 0)


def test_views_are_cut_once() -> None:
    arena = poisoned_arena()
    place(arena, 3, uniform(4, 1), {"attention": 0, "mlp": 0})
    assert arena.weights("qkv", 0, 3) is arena.weights("qkv", 0, 3)


def test_an_adapter_wider_than_its_span_is_an_error() -> None:
    arena = poisoned_arena()
    ranks = uniform(4, 1).ranks
    with pytest.raises(AssertionError, match="ranks fit the span"):
        arena.set_adapter(
            0,
            spans={
                "attention": Span(row0=0, num_rows=3),
                "mlp": Span(row0=0, num_rows=4),
            },
            ranks=ranks,
            scales=ranks,
        )


def test_a_span_outside_the_arena_is_an_error() -> None:
    arena = poisoned_arena()
    with pytest.raises(AssertionError, match="no span ends behind the arena"):
        arena.move("attention", Span(row0=0, num_rows=4), NUM_ROWS - 3)


def test_row_bytes_times_rows_are_all_bytes() -> None:
    num_rows = {"attention": 5, "mlp": 9}
    arena = Arena(
        modules=MODULES, num_layers=3, num_rows=num_rows, dtype=torch.bfloat16, device=CPU
    )
    sizes = Arena.row_bytes(MODULES, num_layers=3, dtype=torch.bfloat16)
    assert sum(sizes[group] * rows for group, rows in num_rows.items()) == arena.num_bytes


def test_an_arena_without_rows_is_empty() -> None:
    num_rows = {"attention": 0, "mlp": 0}
    arena = Arena(modules=MODULES, num_layers=1, num_rows=num_rows, dtype=torch.float32, device=CPU)
    assert arena.num_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_cost_no_memory_before_they_are_written() -> None:
    gc.collect()
    before = _resident_bytes()
    module = ModuleSpec(name="down", group="mlp", in_features=4096, slice_out_features=(4096,))
    arena = Arena(
        modules=[module],
        num_layers=1,
        num_rows={"mlp": 64 * 1024},
        dtype=torch.bfloat16,
        device=CPU,
    )
    assert arena.num_bytes == 1024**3
    assert _resident_bytes() - before < arena.num_bytes // 16
    assert arena.a("down")[0, 0, 12345, 77] == 0


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
