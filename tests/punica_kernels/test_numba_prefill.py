"""Attention of long chunks by numba: each row sees what came before it in its own sequence."""

import numpy as np
import pytest
import torch

from punica_kernels import numba_dots
from punica_kernels.numba_attention import HeadShape
from punica_kernels.numba_prefill import MAX_TILE_ROWS, prefill_kernel, scratch_len, takes
from punica_kernels.words import PAIRS, words

pytestmark = pytest.mark.slow  # numba compiles for each format

DIM = 96  # a panel and a half of pairs
SHAPE = HeadShape(num_heads=6, num_kv_heads=2, head_dim=DIM)
WIDTH, KV_WIDTH, BLOCK_SIZE, NUM_BLOCKS = 6 * DIM, 2 * DIM, 16, 64
NUM_TOKENS = 200  # of the step; most rows are others'
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
NO_DOTS = pytest.mark.skipif(numba_dots.problem() is not None, reason=f"{numba_dots.problem()}")


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [
        pytest.param(torch.float32, np.float32, id="fp32"),
        pytest.param(torch.bfloat16, np.uint16, id="bf16"),
        pytest.param(torch.bfloat16, PAIRS, id="pairs", marks=NO_DOTS),
    ],
)
@pytest.mark.parametrize(
    ("row0", "num_rows", "num_earlier"),
    [(0, 1, 0), (3, 17, 0), (0, 64, 1), (5, 64, 64), (9, 50, 63), (2, 33, 400), (1, 40, 500)],
)
def test_rows_attend_to_their_past_and_read_nothing_else(dtype, seen, row0, num_rows, num_earlier):
    """Cells of others and of the future, and scratch, are NaN; so are rows that nobody wrote."""
    assert num_rows <= MAX_TILE_ROWS
    generator = torch.Generator().manual_seed(num_rows)
    context = num_earlier + num_rows
    table = torch.randperm(NUM_BLOCKS, generator=generator)[: -(-context // BLOCK_SIZE)].tolist()
    k_rows, v_rows = (torch.randn(context, 2, DIM, generator=generator).to(dtype) for _ in range(2))
    cells = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, 2, DIM), torch.nan, dtype=dtype)
    for position in range(context):
        block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        cells[0, block, offset], cells[1, block, offset] = k_rows[position], v_rows[position]
    qkv = torch.full((NUM_TOKENS, WIDTH + 2 * KV_WIDTH), torch.nan, dtype=dtype)
    q = 3 * torch.randn(num_rows, 6, DIM, generator=generator).to(dtype)
    qkv[row0 : row0 + num_rows, :WIDTH] = q.flatten(1)
    out = torch.full((NUM_TOKENS, WIDTH), torch.nan, dtype=dtype)

    tiles = [(row0, num_rows, 1, num_earlier, kv_head) for kv_head in range(2)]
    prefill_kernel(SHAPE)(
        words(qkv).view(seen),
        np.array(tiles, dtype=np.int64),
        np.array([0, 1, 2], dtype=np.int64),
        np.array([[-1] * len(table), table], dtype=np.int32),
        BLOCK_SIZE,
        *(words(one).reshape(-1).view(seen) for one in cells),
        np.full((2, scratch_len(SHAPE)), np.nan, dtype=np.float32),
        words(out).view(seen),
    )

    expected = causal_attention(q.double(), k_rows.double(), v_rows.double())
    got = out[row0 : row0 + num_rows].double().view(num_rows, 6, DIM)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    others = torch.ones(NUM_TOKENS, dtype=torch.bool)
    others[row0 : row0 + num_rows] = False
    assert out[others].isnan().all()


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax(q Kᵀ / √head_dim) V; the last row of q sees all keys, each other one less."""
    num_rows, context = q.shape[0], k.shape[0]
    k, v = (one.repeat_interleave(3, dim=1) for one in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q, k) / q.shape[-1] ** 0.5
    future = torch.arange(context) > torch.arange(context - num_rows, context)[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    return torch.einsum("hrk,khd->rhd", weights, v)


def test_heads_that_are_not_whole_panels_are_refused():
    assert takes(SHAPE)
    assert not takes(HeadShape(num_heads=2, num_kv_heads=2, head_dim=40))
