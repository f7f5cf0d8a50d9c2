"""BGMV and SGMV compute the definition, and touch nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from punica_kernels.arena import Arena, Span
from punica_kernels.plan import LoraPlan, build_plan
from punica_kernels.triton_lora import TritonLora, add_lora
from tests.punica_kernels.triton.lora_worlds import (
    arena_of,
    assert_same,
    expected,
    inputs_of,
    module,
    put_adapter,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RANKS = [1, 3, 8, 13, 16, 17, 64, 100, 256]


def plan_of(*runs: tuple[int | None, int]) -> LoraPlan:
    """Return the plan of runs (lora_index, rows)."""
    plan = build_plan([index for index, _ in runs], [length for _, length in runs])
    assert plan is not None
    return plan


def assert_adds_the_definition(arena: Arena, plan: LoraPlan, *, layer: int = 1) -> None:
    y, x = inputs_of(arena, plan, layer=layer)
    wanted = expected(y, x, arena, plan, layer=layer)
    add_lora(y, x, arena=arena, module=arena.modules[0].name, layer=layer, plan=plan)
    assert_same(y, wanted, arena.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_in_every_format(rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """A segment for the dot, a row for BGMV; a neighbour of another rank, rows of the base."""
    arena = arena_of(module(40), {0: [rank], 1: [5]}, dtype=dtype, device=device)
    assert_adds_the_definition(arena, plan_of((0, 3), (None, 2), (1, 1), (0, 1)))


BATCHES = {
    "one row": [(1, 1)],
    "one row among the base's": [(None, 3), (1, 1), (None, 2)],
    "empty runs": [(0, 0), (1, 2), (2, 0), (2, 1), (None, 0)],
    "one adapter, 300 rows": [(2, 300)],
    "longer than a tile, beside short ones": [(0, 1), (1, 70), (None, 1), (2, 2)],
    "two runs of one adapter": [(1, 2), (None, 1), (1, 17)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_kind_of_batch(batch: str, dtype: torch.dtype, device: torch.device) -> None:
    """Ragged slices of q|k|v, each with its own rank; some adapters leave slices out."""
    adapters = {0: [8, 8, 8], 1: [4, 0, 20], 2: [0, 3, 0]}
    arena = arena_of(module(21, 9, 5), adapters, dtype=dtype, device=device)
    for layer in range(2):
        assert_adds_the_definition(arena, plan_of(*BATCHES[batch]), layer=layer)


def test_all_base_needs_no_launch() -> None:
    """There is no plan, so nothing can be launched."""
    assert build_plan([None, None], [3, 1]) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forty_adapters_with_a_row_each(dtype: torch.dtype, device: torch.device) -> None:
    """In no order of lora_index, each of its own rank."""
    adapters = {7 * number % 41: [1 + number % 9] for number in range(1, 41)}
    arena = arena_of(module(12, in_features=20), adapters, dtype=dtype, device=device)
    assert_adds_the_definition(arena, plan_of(*[(index, 1) for index in adapters]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_k_is_cut_into_splits(rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """2,500 input columns are three splits, the last of them shorter."""
    arena = arena_of(module(16, in_features=2500), {0: [6]}, dtype=dtype, device=device)
    assert_adds_the_definition(arena, plan_of((None, 1), (0, rows)))


@settings(max_examples=15, derandomize=True)
@given(
    ranks=st.lists(
        st.lists(st.integers(0, 20), min_size=2, max_size=2), min_size=1, max_size=4
    ).filter(lambda ranks: all(max(line) > 0 for line in ranks)),
    data=st.data(),
)
def test_any_plan_over_any_ranks(
    ranks: list[list[int]], data: st.DataObject, device: torch.device
) -> None:
    indices = st.none() | st.integers(0, len(ranks) - 1)
    runs = data.draw(st.lists(st.tuples(indices, st.sampled_from([0, 1, 1, 2, 18])), max_size=5))
    arena = arena_of(module(10, 3), dict(enumerate(ranks)), dtype=torch.float32, device=device)
    assert_adds_the_definition(arena, plan_of(*runs, (0, 1)))


def test_columns_of_a_wider_tensor(device: torch.device) -> None:
    """As a fused product hands them out: the neighbours are left alone."""
    arena = arena_of(module(10, 6), {0: [4, 4]}, dtype=torch.bfloat16, device=device)
    plan = plan_of((0, 2), (None, 1), (0, 1))
    y, x = inputs_of(arena, plan, layer=1)
    wanted = expected(y, x, arena, plan, layer=1)
    wide_y = torch.full((4, 23), 3.0, dtype=y.dtype, device=device)
    wide_x = torch.full((4, 60), torch.nan, dtype=x.dtype, device=device)
    wide_y[:, 2:18], wide_x[:, 5:53] = y, x
    add_lora(wide_y[:, 2:18], wide_x[:, 5:53], arena=arena, module="qkv", layer=1, plan=plan)
    assert_same(wide_y[:, 2:18], wanted, torch.bfloat16)
    assert (wide_y[:, :2] == 3).all()
    assert (wide_y[:, 18:] == 3).all()


@pytest.mark.parametrize("rows", [1, 4])
def test_logits_are_fp32_over_a_bf16_base(rows: int, device: torch.device) -> None:
    arena = arena_of(module(50), {0: [7]}, dtype=torch.bfloat16, device=device)
    plan = plan_of((0, rows))
    y, x = inputs_of(arena, plan, layer=0, y_dtype=torch.float32)
    wanted = expected(y, x, arena, plan, layer=0)
    add_lora(y, x, arena=arena, module="qkv", layer=0, plan=plan)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_rows_result_does_not_depend_on_its_neighbours(
    rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Bitwise (E3): alone, among others, elsewhere in the step; split K included."""
    adapters = {0: [9], 1: [30], 2: [3]}
    arena = arena_of(module(20, in_features=1100), adapters, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 1100, generator=generator).to(device=device, dtype=dtype)
    mine = slice(7, 7 + rows)
    alone = added(arena, x[mine], plan_of((0, rows)))
    among = added(arena, x, plan_of((1, 1), (2, 6), (0, rows), (None, 1), (1, 12 - rows)))
    assert torch.equal(among[mine], alone)
    if rows > 1:  # and not on the other rows of its own tile
        x[8:] = -3.0
        assert torch.equal(added(arena, x[mine], plan_of((0, rows)))[0], alone[0])


def added(arena: Arena, x: Tensor, plan: LoraPlan) -> Tensor:
    y = torch.zeros(x.shape[0], 20, dtype=arena.dtype, device=arena.device)
    add_lora(y, x, arena=arena, module="qkv", layer=1, plan=plan)
    return y


def test_more_segments_than_the_bucket_of_a_graph(device: torch.device) -> None:
    """Eight rows fill a bucket; the ninth needs the next one, and a graph of its own."""
    adapters = {index: [2] for index in range(9)}
    arena = arena_of(module(8, in_features=8), adapters, dtype=torch.float32, device=device)
    lora = TritonLora(arena)
    plans = [lora.plan(build_plan_of_rows(count, num_tokens=12)) for count in (3, 8, 9)]
    assert [plan.rows.shape[0] for plan in plans] == [8, 8, 16]
    assert plans[0].shape == plans[1].shape
    with pytest.raises(AssertionError, match="plans of its own shape"):
        plans[0].take(plans[2])
    for plan in plans:
        count = int((plan.rows[:, 1] >= 0).sum())
        assert_adds_the_definition(arena, build_plan_of_rows(count, num_tokens=12))
        assert plan.num_tokens == 12


def build_plan_of_rows(count: int, *, num_tokens: int) -> LoraPlan:
    return plan_of(*[(index, 1) for index in range(count)], (None, num_tokens - count))


def test_a_captured_plan_takes_another_ones_numbers(device: torch.device) -> None:
    """What a graph does: the tensors stay, their numbers change, padding included."""
    adapters = {0: [4], 1: [3], 2: [4]}
    arena = arena_of(module(8, in_features=8), adapters, dtype=torch.float32, device=device)
    lora = TritonLora(arena)
    first, second = plan_of((0, 1), (1, 3), (None, 1)), plan_of((None, 1), (2, 2), (1, 1), (0, 1))
    captured = lora.plan(first)
    captured.take(lora.plan(second))
    y, x = inputs_of(arena, second, layer=1)
    wanted = expected(y, x, arena, second, layer=1)
    lora.add_lora(y, x, module="qkv", layer=1, plan=captured)
    assert_same(y, wanted, torch.float32)


def test_tables_follow_a_swap_and_a_move(device: torch.device) -> None:
    """A step's plan looks up what changed since the last one; the tables grow with the indices."""
    arena = arena_of(module(8, 8), {0: [4, 4], 200: [6, 2]}, dtype=torch.float32, device=device)
    lora = TritonLora(arena)
    plan = plan_of((0, 2), (200, 1))
    for change in (
        lambda: None,
        lambda: arena.move("attention", Span(row0=6, num_rows=6), 5),
        lambda: put_adapter(arena, 0, Span(row0=2, num_rows=2), [2, 1]),
    ):
        change()
        device_plan = lora.plan(plan)
        y, x = inputs_of(arena, plan, layer=0)
        wanted = expected(y, x, arena, plan, layer=0)
        lora.add_lora(y, x, module="qkv", layer=0, plan=device_plan)
        assert_same(y, wanted, torch.float32)
    assert lora.tables.capacity == 256


def test_a_launch_refuses_what_its_kernel_would_misread(device: torch.device) -> None:
    arena = arena_of(module(8, in_features=8), {0: [4]}, dtype=torch.float32, device=device)
    lora = TritonLora(arena)
    plan = lora.plan(plan_of((0, 2), (0, 1)))
    y, x = (torch.zeros(3, 8, device=device) for _ in range(2))
    for bad_y, bad_x, words in (
        (y, x.half(), "the base's format"),
        (y, x[:2], "the module's input"),
        (y[:, :4], x, "the module's output"),
        (y, x.T.contiguous().T, "side by side"),
        (y.double(), x, "no format of these kernels"),
    ):
        with pytest.raises(AssertionError, match=words):
            lora.add_lora(bad_y, bad_x, module="qkv", layer=0, plan=plan)
