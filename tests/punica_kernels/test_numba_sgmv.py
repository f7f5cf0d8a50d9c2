"""LoRA over long segments by numba: the definition, and nothing else touched."""

import numpy as np
import pytest
import torch

from punica_kernels.arena import ModuleSpec, Span
from punica_kernels.numba_sgmv import MAX_TILE_ROWS, add_tiles, scratch_len, takes
from punica_kernels.words import words
from tests.punica_kernels.worlds import poisoned_arena

pytestmark = pytest.mark.slow  # numba compiles for each format

MODULE = ModuleSpec(name="qkv", group="attention", in_features=96, slice_out_features=(160, 32, 64))
NUM_ROWS = 40
TILES = [(3, 1, 0), (4, MAX_TILE_ROWS, 1), (100, 23, 0), (130, 5, 2)]
NUM_TOKENS = 140
RANKS = [[[5, 16, 1]], [[16, 0, 7]], [[0, 0, 4]]]  # by adapter, layer and slice
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tiles_add_what_the_definition_says_and_touch_nothing_else(dtype: torch.dtype):
    """Rows of nobody, rows above a slice's rank, scratch and the base's inputs are NaN."""
    arena = poisoned_arena(dtype, NUM_ROWS, modules=[MODULE], num_layers=1)
    generator = torch.Generator().manual_seed(0)
    x = torch.full((NUM_TOKENS, 96), torch.nan, dtype=dtype)
    y = torch.randn(NUM_TOKENS, MODULE.out_features, generator=generator).to(dtype)
    expected = y.double()
    for lora_index, ranks in enumerate(RANKS):
        span = Span(row0=1 + 17 * lora_index if lora_index < 2 else 36, num_rows=max(ranks[0]))
        scales = [[0.5, 1.0, 2.0]]
        arena.set_adapter(
            lora_index, spans={"attention": span}, ranks={"qkv": ranks}, scales={"qkv": scales}
        )
        for index, (rank, scale) in enumerate(zip(ranks[0], scales[0], strict=True)):
            a = (torch.randn(rank, 96, generator=generator) / 10).to(dtype)
            b = torch.randn(rank, MODULE.slice_out_features[index], generator=generator).to(dtype)
            arena.write("qkv", 0, index, span, a=a, b=b)
            for start, num_tokens, owner in TILES:
                if owner == lora_index:
                    rows = slice(start, start + num_tokens)
                    if x[rows].isnan().any():
                        x[rows] = torch.randn(num_tokens, 96, generator=generator).to(dtype)
                    columns = slice(MODULE.column0(index), MODULE.column0(index) + b.shape[1])
                    expected[rows, columns] += x[rows].double() @ a.double().T @ b.double() * scale

    views = arena.views("qkv", 0)
    kind = views[0].dtype
    add_tiles(
        words(y).view(kind),
        words(x).view(kind),
        *views,
        np.array(TILES, dtype=np.int64),
        np.array([0, 2, 4], dtype=np.int64),
        np.full((2, scratch_len(in_features=96, max_rank=16)), np.nan, dtype=np.float32),
    )

    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    untouched = x.isnan().any(dim=1)
    assert torch.equal(y[untouched].double(), expected[untouched])


def test_modules_that_are_not_whole_panels_are_refused():
    assert takes(MODULE)
    odd = ModuleSpec(name="o", group="attention", in_features=96, slice_out_features=(40,))
    assert not takes(odd)
