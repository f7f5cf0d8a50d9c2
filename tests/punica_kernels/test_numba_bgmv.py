"""LoRA of few tokens by bf16 dot products: the definition, and nothing else touched."""

import numpy as np
import pytest
import torch

from punica_kernels.arena import Arena, ModuleSpec, Span
from punica_kernels.numba_bgmv import add_rows, add_rows_serially, takes
from punica_kernels.numba_dots import LANES, problem
from punica_kernels.words import PAIRS, words
from tests.punica_kernels.worlds import poisoned_arena

pytestmark = pytest.mark.slow  # numba compiles
needs_dots = pytest.mark.skipif(problem() is not None, reason=problem() or "they run")

# Slices of many vectors, of one, and of many and some.
MODULE = ModuleSpec(
    name="qkv", group="attention", in_features=96, slice_out_features=(192, 32, 256)
)
NUM_ROWS, NUM_TOKENS, CANARY = 80, 20, 7.0
SEGMENTS = [(2, 1, 0), (3, 8, 1), (12, 1, 3), (13, 2, 2), (16, 1, 0)]
PADDED_RANK = 48  # of 33
RANKS = [[5, 16, 1], [16, 0, 7], [0, 0, 4], [33, 32, 17]]  # by adapter and slice
ROW0S = [1, 7, 24, 30]


@needs_dots
@pytest.mark.parametrize("add", [add_rows, add_rows_serially])
def test_segments_add_what_the_definition_says_and_touch_nothing_else(add):
    """Rows of nobody, rows above a slice's rank, scratch and the base's inputs are NaN."""
    arena, x, y, expected = _world()
    scratch = np.full((2, 64), np.nan, dtype=np.float32)
    scratch[:, PADDED_RANK:] = CANARY
    add(
        words(y).view(PAIRS),
        words(x).view(PAIRS),
        *arena.views("qkv", 1),
        np.array(SEGMENTS, dtype=np.int64),
        np.array([0, 2, len(SEGMENTS)], dtype=np.int64),
        scratch,
    )
    assert (scratch[:, PADDED_RANK:] == CANARY).all()
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)
    untouched = x.isnan().any(dim=1)
    assert untouched.any()
    assert torch.equal(y[untouched].double(), expected[untouched])


@needs_dots
def test_a_row_is_the_same_alone_and_among_others():
    arena, x, y, _ = _world()
    alone = y.clone()
    for result, segments in ((y, SEGMENTS), (alone, [(3, 1, 1)])):
        add_rows(
            words(result).view(PAIRS),
            words(x).view(PAIRS),
            *arena.views("qkv", 1),
            np.array(segments, dtype=np.int64),
            np.array([0, len(segments)], dtype=np.int64),
            np.zeros((1, 48), dtype=np.float32),
        )
    assert torch.equal(alone[3], y[3])


def test_what_is_not_whole_vectors_of_bf16_is_refused():
    odd = ModuleSpec(name="o", group="attention", in_features=96, slice_out_features=(48,))
    assert not takes(odd, torch.bfloat16)
    assert not takes(MODULE, torch.float32)
    assert takes(MODULE, torch.bfloat16) == (problem() is None)
    assert MODULE.in_features % (2 * LANES) == 0


def _world() -> tuple[Arena, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an arena of two layers, inputs, outputs before, and what these should become."""
    dtype = torch.bfloat16
    arena = poisoned_arena(dtype, NUM_ROWS, modules=[MODULE], num_layers=2)
    generator = torch.Generator().manual_seed(0)
    x = torch.full((NUM_TOKENS, MODULE.in_features), torch.nan, dtype=dtype)
    y = torch.randn(NUM_TOKENS, MODULE.out_features, generator=generator).to(dtype)
    for start, num_tokens, _ in SEGMENTS:
        fresh = torch.randn(num_tokens, MODULE.in_features, generator=generator)
        x[start : start + num_tokens] = fresh.to(dtype)
    expected, scales = y.double(), [0.5, 1.0, 2.0]
    for lora_index, ranks in enumerate(RANKS):
        span = Span(row0=ROW0S[lora_index], num_rows=max(ranks))
        arena.set_adapter(
            lora_index,
            spans={"attention": span},
            ranks={"qkv": [ranks] * 2},
            scales={"qkv": [scales] * 2},
        )
        for index, rank in enumerate(ranks):
            width = MODULE.slice_out_features[index]
            a = (torch.randn(rank, MODULE.in_features, generator=generator) / 10).to(dtype)
            b = torch.randn(rank, width, generator=generator).to(dtype)
            arena.write("qkv", 1, index, span, a=a, b=b)
            columns = slice(MODULE.column0(index), MODULE.column0(index) + width)
            for start, num_tokens, owner in SEGMENTS:
                if owner == lora_index:
                    rows = slice(start, start + num_tokens)
                    v = x[rows].double() @ a.double().T * scales[index]
                    expected[rows, columns] += v @ b.double()
    return arena, x, y, expected
