"""FlashInfer's attention is used as its documentation says, and gives the definition's rows."""

import inspect
from pathlib import Path

import pytest
import torch

from engine.kvcache.storage import KVStorage
from engine.model.attention import attend, plan_attention
from engine.model.attention_trial import trial_problem
from engine.model.inputs import ChunkInput
from punica_kernels import flashinfer_attention
from punica_kernels.flashinfer_attention import AttentionShape, FlashInferAttention
from tests.punica_kernels.flashinfer_double import (
    SIGNATURES,
    PagedPrefillDouble,
    missing_names,
)

CPU = torch.device("cpu")
CHUNKS = (
    ChunkInput(row0=0, num_tokens=1, context_len=9, block_table=[11, 3, 7]),
    ChunkInput(row0=1, num_tokens=6, context_len=6, block_table=[0, 5]),
    ChunkInput(row0=7, num_tokens=3, context_len=16, block_table=[2, 9, 1, 4]),
)


def shape(*, heads: tuple[int, int] = (4, 2), block_size: int = 4) -> AttentionShape:
    return AttentionShape(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=16,
        block_size=block_size,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
def test_rows_are_those_of_plain_torch(heads: tuple[int, int]) -> None:
    """Of q that is a part of wider rows; blocks of nobody are NaN."""
    of = shape(heads=heads)
    kv = KVStorage(
        num_layers=2,
        num_blocks=12,
        block_size=of.block_size,
        num_kv_heads=of.num_kv_heads,
        head_dim=of.head_dim,
        dtype=of.dtype,
        device=CPU,
    )
    generator = torch.Generator().manual_seed(0)
    kv.k.copy_(torch.randn(kv.k.shape, generator=generator))
    kv.v.copy_(torch.randn(kv.v.shape, generator=generator))
    wide = torch.randn((10, of.num_heads + 2 * of.num_kv_heads, of.head_dim), generator=generator)
    q = wide[:, : of.num_heads]
    wanted = attend(q, kv, 1, plan_attention(CHUNKS, kv)).view(q.shape)
    kv.k[:, 6], kv.v[:, 6] = torch.nan, torch.nan
    attention = FlashInferAttention(PagedPrefillDouble, shape=of, device=CPU)
    found = attention.plan(CHUNKS).attend(q, k=kv.k[1], v=kv.v[1])
    torch.testing.assert_close(found, wanted)


def test_the_trial_takes_what_has_the_contract() -> None:
    attention = FlashInferAttention(PagedPrefillDouble, shape=shape(), device=CPU)
    assert trial_problem(attention, shape=shape(), device=CPU) is None


class Unmasked(PagedPrefillDouble):
    """Lets every query see every key."""

    def plan(self, *args: object, **more: object) -> None:
        super().plan(*args, **(more | {"causal": False}))


class Unordered(PagedPrefillDouble):
    """Takes the pages of a request for those of another place."""

    def plan(self, *args: object, **more: object) -> None:
        pages = more["paged_kv_indices"].flip(0)
        super().plan(*args, **(more | {"paged_kv_indices": pages}))


class WithoutNumbers(PagedPrefillDouble):
    """Returns NaN."""

    def run(self, *args: object, **more: object) -> torch.Tensor:
        return super().run(*args, **more).fill_(torch.nan)


@pytest.mark.parametrize("wrapper", [Unmasked, Unordered, WithoutNumbers])
def test_the_trial_refuses_what_computes_something_else(wrapper: type) -> None:
    attention = FlashInferAttention(wrapper, shape=shape(), device=CPU)
    problem = trial_problem(attention, shape=shape(), device=CPU)
    assert problem is not None
    assert "off by" in problem


@pytest.mark.parametrize("method", SIGNATURES)
def test_the_double_has_the_names_that_are_written_down(method: str) -> None:
    assert (
        list(inspect.signature(getattr(PagedPrefillDouble, method)).parameters)
        == SIGNATURES[method]
    )


def test_nothing_of_ours_imports_flashinfer_before_it_is_chosen() -> None:
    source = Path(flashinfer_attention.__file__).read_text(encoding="utf-8")
    assert "import flashinfer" not in source
    assert "from flashinfer" not in source


@pytest.mark.gpu
class TestInstalled:
    """The real package on a real device."""

    @pytest.mark.parametrize("method", SIGNATURES)
    def test_has_the_names_that_are_used(self, method: str) -> None:
        flashinfer = pytest.importorskip("flashinfer")
        assert missing_names(flashinfer.BatchPrefillWithPagedKVCacheWrapper, method) == []

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("heads", [(8, 8), (9, 3), (32, 8)], ids=str)
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_gives_the_rows_of_plain_torch(
        self, head_dim: int, heads: tuple[int, int], dtype: torch.dtype
    ) -> None:
        flashinfer = pytest.importorskip("flashinfer")
        device = torch.device("cuda", 0)
        of = AttentionShape(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            block_size=16,
            dtype=dtype,
        )
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        attention = FlashInferAttention(wrapper, shape=of, device=device)
        assert trial_problem(attention, shape=of, device=device) is None
