"""The embedding's lookup and the head's rows: modules that the arena has once, not per layer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from punica_kernels.arena import Arena, ModuleSpec, Span
from punica_kernels.dispatch import add_lora, add_lora_embedding
from punica_kernels.plan import LoraPlan, build_plan, select_rows
from tests.punica_kernels.worlds import CPU, plans

VOCAB, HIDDEN, NUM_ROWS = 10, 6, 8
MODULES = (
    ModuleSpec(
        name="embedding",
        group="embedding",
        in_features=VOCAB,
        slice_out_features=(HIDDEN,),
        num_layers=1,
    ),
    ModuleSpec(
        name="head",
        group="head",
        in_features=HIDDEN,
        slice_out_features=(VOCAB,),
        num_layers=1,
    ),
)
RANKS = {0: {"embedding": 2, "head": 3}, 1: {"embedding": 4}, 2: {}}
SCALES = {0: 0.5, 1: 3.0}
ROW0 = {0: 5, 1: 1, 2: 0}


def factors(lora_index: int, module: str) -> tuple[Tensor, Tensor]:
    """Return a [rank, in] and b [rank, out]."""
    spec = next(one for one in MODULES if one.name == module)
    rank = RANKS[lora_index][module]
    generator = torch.Generator().manual_seed(lora_index)
    a = torch.randn(rank, spec.in_features, generator=generator)
    return a, torch.randn(rank, spec.out_features, generator=generator)


def arena(dtype: torch.dtype = torch.float32) -> Arena:
    made = Arena(
        modules=MODULES,
        num_layers=7,
        num_rows={"embedding": NUM_ROWS, "head": NUM_ROWS},
        dtype=dtype,
        device=CPU,
    )
    for module in MODULES:
        made.a(module.name).fill_(torch.nan)
        made.b(module.name).fill_(torch.nan)
    for lora_index, ranks in RANKS.items():
        spans = {name: Span(row0=ROW0[lora_index], num_rows=rank) for name, rank in ranks.items()}
        for name, span in spans.items():
            a, b = factors(lora_index, name)
            made.write(name, 0, 0, span, a=a, b=b)
        made.set_adapter(
            lora_index,
            spans=spans,
            ranks={name: [[rank]] for name, rank in ranks.items()},
            scales={name: [[SCALES[lora_index]]] for name in ranks},
        )
    return made


def test_modules_outside_the_layers_are_there_once() -> None:
    made = arena()
    assert made.a("embedding").shape == (1, 1, NUM_ROWS, VOCAB)
    assert made.b("head").shape == (1, NUM_ROWS, VOCAB)
    sizes = Arena.row_bytes(MODULES, num_layers=7, dtype=torch.bfloat16)
    assert sizes == {"embedding": 2 * (VOCAB + HIDDEN), "head": 2 * (VOCAB + HIDDEN)}
    assert [made.carries("head", lora_index) for lora_index in RANKS] == [True, False, False]
    made.move("embedding", Span(row0=5, num_rows=2), 0)
    assert made.spans(0)["embedding"].row0 == 0
    assert made.spans(0)["head"].row0 == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(plan=plans(num_adapters=3), seed=st.integers(0, 99))
def test_an_embedding_s_part_is_the_product_with_a_one_hot_row(
    dtype: torch.dtype, plan: LoraPlan, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(VOCAB, (plan.num_tokens,), generator=generator)
    y = torch.randn(plan.num_tokens, HIDDEN, generator=generator).to(dtype)
    expected = y.double()
    for segment in plan.segments:
        if "embedding" in RANKS[segment.lora_index]:
            a, b = (each.to(dtype).double() for each in factors(segment.lora_index, "embedding"))
            rows = slice(segment.start, segment.stop)
            one_hot = torch.nn.functional.one_hot(token_ids[rows], VOCAB).double()
            expected[rows] += SCALES[segment.lora_index] * (one_hot @ a.T @ b)

    add_lora_embedding(y, token_ids, arena=arena(dtype), plan=plan)

    torch.testing.assert_close(
        y.double(), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5
    )


@given(plan=plans(num_adapters=3), data=st.data())
def test_rows_of_a_step_keep_their_adapters_in_the_head(
    plan: LoraPlan, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.integers(0, plan.num_tokens - 1), min_size=1, max_size=9))
    x = torch.randn(plan.num_tokens, HIDDEN, generator=torch.Generator().manual_seed(5))
    whole, picked = torch.zeros(plan.num_tokens, VOCAB), torch.zeros(len(rows), VOCAB)
    made = arena()
    add_lora(whole, x, arena=made, module="head", layer=0, plan=plan)

    head_plan = select_rows(plan, rows)
    if head_plan is not None:
        add_lora(picked, x[rows], arena=made, module="head", layer=0, plan=head_plan)

    torch.testing.assert_close(picked, whole[rows])


def test_rows_without_adapter_need_no_plan() -> None:
    plan = build_plan([None, 1, None], [2, 1, 2])
    assert plan is not None
    assert select_rows(plan, [0, 1, 4]) is None
    chosen = select_rows(plan, [2, 0, 2, 2])
    assert chosen is not None
    assert [(each.start, each.num_tokens) for each in chosen.segments] == [(0, 1), (2, 2)]
