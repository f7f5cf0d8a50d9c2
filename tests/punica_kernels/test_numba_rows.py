"""Row-wise numba kernels: the norm, with and without the residual, and SwiGLU's product."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from hypothesis import given
from hypothesis import strategies as st

from punica_kernels import numba_rows
from punica_kernels.words import words

pytestmark = pytest.mark.slow  # numba compiles for each format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-5
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6},  # one last place
}
NORMS = {"two threads": numba_rows.rms_norm, "one thread": numba_rows.rms_norm_serially}
ADD_NORMS = {
    "two threads": numba_rows.add_rms_norm,
    "one thread": numba_rows.add_rms_norm_serially,
}


def random(shape: tuple[int, ...], dtype: torch.dtype, *, seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], None, EPS) * weight


shapes = st.tuples(st.integers(1, 9), st.sampled_from([1, 7, 16, 96, 130]))
scales = st.sampled_from([1e-3, 1.0, 300.0])


@pytest.mark.parametrize("threads", NORMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(shape=shapes, scale=scales)
def test_a_row_is_normed_as_torch_does(threads, dtype, shape, scale):
    x, weight = random(shape, dtype, seed=1, scale=scale), random(shape[1:], dtype, seed=2, scale=1)
    out = torch.full(shape, torch.nan, dtype=dtype)
    NORMS[threads](words(x), words(weight), np.float32(EPS), words(out))
    torch.testing.assert_close(out, norm_of(x, weight), **TOLERANCE[dtype])


@pytest.mark.parametrize("threads", ADD_NORMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(shape=shapes, scale=scales)
def test_the_residual_is_added_in_place_and_then_normed(threads, dtype, shape, scale):
    residual, y = (random(shape, dtype, seed=seed, scale=scale) for seed in (1, 2))
    weight = random(shape[1:], dtype, seed=3, scale=1)
    total = residual + y
    out = torch.full(shape, torch.nan, dtype=dtype)
    ADD_NORMS[threads](words(residual), words(y), words(weight), np.float32(EPS), words(out))
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    torch.testing.assert_close(out, norm_of(total, weight), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(shape=shapes, scale=scales)
def test_silu_times_up_is_torchs(dtype, shape, scale):
    num_tokens, inner = shape
    gate_up = random((num_tokens, 2 * inner), dtype, seed=4, scale=scale)
    out = torch.full(shape, torch.nan, dtype=dtype)
    numba_rows.silu_mul(words(gate_up), words(out))
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(out, F.silu(gate) * up, **TOLERANCE[dtype])


def test_nan_stays_in_its_row():
    x = torch.ones(3, 16)
    x[1, 4] = torch.nan
    out = torch.zeros_like(x)
    numba_rows.rms_norm(words(x), words(torch.ones(16)), np.float32(EPS), words(out))
    assert out.isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("value", [0.0, -0.0, torch.inf, -torch.inf, 3.3895e38, 1e-40, -1.00390625])
def test_bf16_is_rounded_as_torch_rounds(value):
    residual = torch.tensor([[value]]).to(torch.bfloat16)
    zero, one = torch.zeros(1, 1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    expected = residual + zero
    numba_rows.add_rms_norm(
        words(residual), words(zero), words(one), np.float32(EPS), words(zero.clone())
    )
    assert torch.equal(residual, expected)
