"""A tiny arena in which everything that may not be read is NaN, and plans over it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from punica_kernels.arena import Arena, ModuleSpec, Span
from punica_kernels.plan import LoraPlan, build_plan

NUM_LAYERS, NUM_ROWS = 2, 24
CPU = torch.device("cpu")
MODULES = (
    ModuleSpec(name="qkv", group="attention", in_features=12, slice_out_features=(8, 4, 4)),
    ModuleSpec(name="o", group="attention", in_features=8, slice_out_features=(12,)),
    ModuleSpec(name="down", group="mlp", in_features=7, slice_out_features=(12,)),
)


def poisoned_arena(
    dtype: torch.dtype = torch.float32,
    num_rows: int = NUM_ROWS,
    *,
    modules: Sequence[ModuleSpec] = MODULES,
    num_layers: int = NUM_LAYERS,
) -> Arena:
    arena = Arena(
        modules=modules,
        num_layers=num_layers,
        num_rows=dict.fromkeys((module.group for module in modules), num_rows),
        dtype=dtype,
        device=CPU,
    )
    for module in modules:
        arena.a(module.name).fill_(torch.nan)
        arena.b(module.name).fill_(torch.nan)
    return arena


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyAdapter:
    """Ranks by module, layer and slice; 0 leaves the slice out."""

    ranks: dict[str, list[list[int]]]
    seed: int

    def num_rows(self, group: str) -> int:
        names = [module.name for module in MODULES if module.group == group]
        return max((max(line) for name in names for line in self.ranks[name]), default=0)

    def scale(self, layer: int, slice_index: int) -> float:
        return 0.25 * (1 + layer + 2 * slice_index)

    def factors(self, module: str, layer: int, slice_index: int) -> tuple[Tensor, Tensor]:
        """Return a [rank, in] and b [rank, out of the slice], both in fp32."""
        spec = next(one for one in MODULES if one.name == module)
        rank = self.ranks[module][layer][slice_index]
        number = MODULES.index(spec) * 100 + layer * 10 + slice_index
        rng = np.random.default_rng([self.seed, number])
        a = rng.standard_normal((rank, spec.in_features), dtype=np.float32)
        b = rng.standard_normal((rank, spec.slice_out_features[slice_index]), dtype=np.float32)
        return torch.from_numpy(a), torch.from_numpy(b)


def place(arena: Arena, lora_index: int, adapter: TinyAdapter, row0: dict[str, int]) -> None:
    """Write an adapter's rows at row0 of each group and set its tables."""
    spans = {
        group: Span(row0=start, num_rows=adapter.num_rows(group)) for group, start in row0.items()
    }
    for module in MODULES:
        for layer in range(NUM_LAYERS):
            for slice_index, rank in enumerate(adapter.ranks[module.name][layer]):
                if rank > 0:
                    a, b = adapter.factors(module.name, layer, slice_index)
                    span = spans[module.group]
                    arena.write(module.name, layer, slice_index, span, a=a, b=b)
    scales = {
        module.name: [
            [adapter.scale(layer, index) for index in range(module.num_slices)]
            for layer in range(NUM_LAYERS)
        ]
        for module in MODULES
    }
    arena.set_adapter(lora_index, spans=spans, ranks=adapter.ranks, scales=scales)


def rank_tables(max_rank: int = 4) -> st.SearchStrategy[dict[str, list[list[int]]]]:
    """Ranks of all slices: often one rank throughout, often some slices missing."""

    def table(module: ModuleSpec) -> st.SearchStrategy[list[list[int]]]:
        line = st.lists(
            st.integers(0, max_rank), min_size=module.num_slices, max_size=module.num_slices
        )
        uniform = st.integers(0, max_rank).map(lambda rank: [rank] * module.num_slices)
        return st.lists(line | uniform, min_size=NUM_LAYERS, max_size=NUM_LAYERS)

    return st.fixed_dictionaries({module.name: table(module) for module in MODULES})


def tiny_adapters(max_rank: int = 4) -> st.SearchStrategy[TinyAdapter]:
    return st.builds(TinyAdapter, ranks=rank_tables(max_rank), seed=st.integers(0, 99))


@st.composite
def plans(draw: st.DrawFn, num_adapters: int) -> LoraPlan:
    """Runs of adapters and of the base: empty ones, one row, many; never all without adapter."""
    runs = draw(
        st.lists(
            st.tuples(
                st.none() | st.integers(0, num_adapters - 1), st.sampled_from([0, 1, 1, 2, 5])
            ),
            min_size=1,
            max_size=6,
        )
    )
    runs.append((draw(st.integers(0, num_adapters - 1)), 1))
    if draw(st.booleans()):
        runs.append((None, 2))
    plan = build_plan([index for index, _ in runs], [length for _, length in runs])
    assert plan is not None
    return plan


def tokens_with_adapter(plan: LoraPlan) -> Tensor:
    """Return [num_tokens] bools: inside a segment."""
    inside = torch.zeros(plan.num_tokens, dtype=torch.bool)
    for segment in plan.segments:
        inside[segment.start : segment.stop] = True
    return inside
