"""Both back ends compute the definition, and touch nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from punica_kernels import cpu, dispatch, reference
from punica_kernels.arena import Arena
from punica_kernels.numba_lora import MAX_TOKENS, add_segments, scratch_len
from punica_kernels.plan import LoraPlan, build_plan
from punica_kernels.words import words
from tests.punica_kernels.worlds import (
    MODULES,
    NUM_LAYERS,
    TinyAdapter,
    place,
    plans,
    poisoned_arena,
    tiny_adapters,
    tokens_with_adapter,
)


def numba_add_lora(
    y: Tensor, x: Tensor, *, arena: Arena, module: str, layer: int, plan: LoraPlan
) -> None:
    """Run the numba kernel on two threads, over segments cut to what it takes."""
    pieces = [
        (start, min(MAX_TOKENS, one.stop - start), one.lora_index)
        for one in plan.segments
        for start in range(one.start, one.stop, MAX_TOKENS)
    ]
    segments = np.array(pieces, dtype=np.int64)
    starts = np.array([0, len(pieces) // 2, len(pieces)], dtype=np.int64)
    scratch = np.full(
        (2, scratch_len(in_features=12, out_features=16, num_slices=3, max_rank=8)),
        np.nan,
        np.float32,
    )
    views = arena.views(module, layer)
    kind = views[0].dtype
    add_segments(words(y).view(kind), words(x).view(kind), *views, segments, starts, scratch)


BACK_ENDS = {
    "reference": reference.add_lora,
    "cpu": cpu.add_lora,
    "dispatch": dispatch.add_lora,
    "numba": numba_add_lora,
}
# numba compiles for each format: more than a few seconds.
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name == "numba" else ()) for name in BACK_ENDS
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS_PER_ADAPTER = 5


def arena_with(adapters: list[TinyAdapter], dtype: torch.dtype) -> Arena:
    arena = poisoned_arena(dtype, num_rows=ROWS_PER_ADAPTER * len(adapters) + 3)
    for index, adapter in enumerate(adapters):
        # Not in the order of lora_index, and not at the same rows in both groups.
        last_first = ROWS_PER_ADAPTER * (len(adapters) - 1 - index)
        place(arena, index, adapter, {"attention": last_first, "mlp": ROWS_PER_ADAPTER * index})
    return arena


def expected_delta(
    adapters: list[TinyAdapter], x: Tensor, *, module: str, layer: int, plan: LoraPlan
) -> Tensor:
    """Return the sum that LoRA stands for, token by token in fp64, over the weights as stored."""
    spec = next(one for one in MODULES if one.name == module)
    delta = torch.zeros(plan.num_tokens, spec.out_features, dtype=torch.float64)
    for segment in plan.segments:
        adapter = adapters[segment.lora_index]
        for token in range(segment.start, segment.stop):
            for index, width in enumerate(spec.slice_out_features):
                a, b = adapter.factors(module, layer, index)
                a, b = a.to(x.dtype).double(), b.to(x.dtype).double()
                column0 = spec.column0(index)
                part = x[token].double() @ a.T @ b * adapter.scale(layer, index)
                delta[token, column0 : column0 + width] += part
    return delta


def touched(adapters: list[TinyAdapter], *, module: str, layer: int, plan: LoraPlan) -> Tensor:
    """Return [num_tokens, out] bools: elements that some adapter adds to."""
    spec = next(one for one in MODULES if one.name == module)
    mask = torch.zeros(plan.num_tokens, spec.out_features, dtype=torch.bool)
    for segment in plan.segments:
        ranks = adapters[segment.lora_index].ranks[module][layer]
        for index, width in enumerate(spec.slice_out_features):
            column0 = spec.column0(index)
            if ranks[index] > 0:
                mask[segment.start : segment.stop, column0 : column0 + width] = True
    return mask


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[TinyAdapter], LoraPlan]:
    adapters = draw(st.lists(tiny_adapters(), min_size=1, max_size=4))
    return adapters, draw(plans(len(adapters)))


@pytest.mark.parametrize("poison", [float("nan"), 7.0])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("back_end", NAMES)
@given(case=cases(), module=st.sampled_from(MODULES), layer=st.integers(0, NUM_LAYERS - 1))
def test_every_back_end_adds_what_the_definition_says_and_touches_nothing_else(
    back_end: str,
    dtype: torch.dtype,
    poison: float,
    case: tuple[list[TinyAdapter], LoraPlan],
    module,
    layer: int,
) -> None:
    """Rows of nobody, of others and above the slice's rank are NaN, as are the base's tokens."""
    adapters, plan = case
    arena = arena_with(adapters, dtype)
    generator = torch.Generator().manual_seed(plan.num_tokens)
    x = torch.randn(plan.num_tokens, module.in_features, generator=generator).to(dtype)
    x[~tokens_with_adapter(plan)] = torch.nan
    mask = touched(adapters, module=module.name, layer=layer, plan=plan)
    before = torch.randn(mask.shape, generator=generator).to(dtype)
    before[~mask] = poison
    # A column view of a wider tensor, as a fused product may hand out.
    wide = torch.full((plan.num_tokens, module.out_features + 5), 3.0, dtype=dtype)
    y = wide[:, 2:-3]
    y.copy_(before)

    BACK_ENDS[back_end](y, x, arena=arena, module=module.name, layer=layer, plan=plan)

    delta = expected_delta(adapters, x, module=module.name, layer=layer, plan=plan)
    expected = (before.double() + delta).to(dtype)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    )
    torch.testing.assert_close(y[mask], expected[mask], **tolerance)
    torch.testing.assert_close(y[~mask], before[~mask], rtol=0, atol=0, equal_nan=True)
    assert (wide[:, :2] == 3).all()
    assert (wide[:, -3:] == 3).all()


@pytest.mark.slow
@given(case=cases(), module=st.sampled_from(MODULES))
def test_bf16_rounds_once_as_the_definition_does(
    case: tuple[list[TinyAdapter], LoraPlan], module
) -> None:
    """v stays in fp32 and y is rounded once: so the back ends differ by one last place at most."""
    adapters, plan = case
    arena = arena_with(adapters, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(plan.num_tokens, module.in_features, generator=generator).bfloat16()
    y = torch.randn(plan.num_tokens, module.out_features, generator=generator).bfloat16()
    results = []
    for back_end in (reference.add_lora, cpu.add_lora, numba_add_lora):
        result = y.clone()
        back_end(result, x, arena=arena, module=module.name, layer=0, plan=plan)
        results.append(result)
    exact = y.double() + expected_delta(adapters, x, module=module.name, layer=0, plan=plan)
    for result in results:
        # Half a last place of bf16; fp32 sums near a tie may fall either way.
        error = (result.double() - exact).abs()
        assert (error <= exact.abs() * (2**-8 + 2**-20) + 1e-5).all()


def test_an_adapters_part_does_not_depend_on_who_else_is_in_the_step() -> None:
    adapters = [
        TinyAdapter(ranks=TEN_ROWS_OF_RANK_3, seed=1),
        TinyAdapter(ranks=TEN_ROWS_OF_RANK_3, seed=2),
    ]
    arena = arena_with(adapters, torch.float32)
    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(3))
    alone, together = torch.zeros(2, 16), torch.zeros(6, 16)
    plan_alone = build_plan([1], [2])
    plan_together = build_plan([0, 1, None], [3, 2, 1])
    assert plan_alone is not None
    assert plan_together is not None
    cpu.add_lora(alone, x[3:5], arena=arena, module="qkv", layer=1, plan=plan_alone)
    cpu.add_lora(together, x, arena=arena, module="qkv", layer=1, plan=plan_together)
    assert torch.equal(together[3:5], alone)
    assert (together[5] == 0).all()


TEN_ROWS_OF_RANK_3 = {
    module.name: [[3] * module.num_slices for _ in range(NUM_LAYERS)] for module in MODULES
}
