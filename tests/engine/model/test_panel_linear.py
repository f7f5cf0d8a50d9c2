"""Our products over the library's weight, against exact ones."""

import pytest
import torch

from engine.model.linear import PackedLinear, PrepackedLinear, prepack, unpacked
from engine.model.panel_linear import PanelLinear
from punica_kernels import numba_dots

needs_dots = pytest.mark.skipif(
    numba_dots.problem() is not None, reason=numba_dots.problem() or "they run"
)


def _linear(width: int, depth: int, *, has_bias: bool) -> PackedLinear:
    generator = torch.Generator().manual_seed(width * depth)
    bias = torch.randn(width, generator=generator).to(torch.bfloat16)
    weight = torch.randn(width, depth, generator=generator).to(torch.bfloat16)
    return unpacked(weight, bias if has_bias else None)


@needs_dots
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("width", "depth"), [(64, 64), (192, 128), (960, 576), (576, 1536)])
def test_rows_are_those_of_the_exact_product(width, depth, has_bias, num_threads):
    threads_before = torch.get_num_threads()
    linear = _linear(width, depth, has_bias=has_bias)
    torch.set_num_threads(num_threads)
    try:
        ours = prepack(linear, PanelLinear.over)
    finally:
        torch.set_num_threads(threads_before)
    assert isinstance(ours, PanelLinear)
    assert ours.num_bytes == linear.num_bytes
    for num_rows in (1, 2, 3, 4, 5, 8, 12, 17, 32, 130):
        x = torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(num_rows))
        x = x.to(torch.bfloat16)
        expected = x.double() @ linear.weight.double().t()
        expected += 0 if linear.bias is None else linear.bias.double()
        got = ours.product(x)
        assert got.dtype is torch.bfloat16
        # Half a unit of bf16's last place, and what fp32's sums of `depth` products may lose.
        torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=depth * 2**-21)


@needs_dots
def test_a_row_is_the_same_whatever_its_neighbours():
    ours = prepack(_linear(960, 576, has_bias=True), PanelLinear.over)
    x = torch.randn(35, 576, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    together = ours.product(x)
    for row in (0, 3, 6, 34):
        assert torch.equal(ours.product(x[row : row + 1])[0], together[row])


@needs_dots
def test_what_is_not_a_number_stays_in_its_row():
    ours = prepack(_linear(64, 64, has_bias=False), PanelLinear.over)
    x = torch.ones(6, 64, dtype=torch.bfloat16)
    x[5, 0], x[4, 0] = float("nan"), float("inf")
    got = ours.product(x)
    assert got[:4].isfinite().all()
    assert got[4].isinf().any()
    assert got[5].isnan().all()


@pytest.mark.parametrize(("width", "depth"), [(96, 64), (64, 80), (200, 72), (64, 577)])
def test_a_weight_that_is_not_in_panels_is_left_to_the_library(width, depth):
    assert isinstance(
        prepack(_linear(width, depth, has_bias=True), PanelLinear.over), PrepackedLinear
    )


def test_a_layout_that_is_another_is_left_to_the_library():
    linear = _linear(64, 64, has_bias=False)
    other = unpacked(linear.weight.t().contiguous())
    assert PanelLinear.over(PrepackedLinear(linear), other) is None


@needs_dots
def test_kernels_that_compute_something_else_are_not_used(monkeypatch):
    monkeypatch.setattr(PanelLinear, "product", lambda self, x: x.new_zeros(x.shape[0], 64))
    packed = prepack(_linear(64, 64, has_bias=False), PanelLinear.over)
    assert isinstance(packed, PrepackedLinear)
