"""Paged attention computes softmax(q Kᵀ) V over each sequence's own cells, and reads no others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from punica_kernels.attention_tiles import PagedPlan, plan_attention
from punica_kernels.paged_attention import paged_attention
from tests.punica_kernels.triton.lora_worlds import TOLERANCES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    row0: int
    num_tokens: int
    context_len: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Cells of nobody are NaN, as are those behind a sequence's last token."""

    chunks: list[Chunk]
    q: Tensor
    k: Tensor
    v: Tensor

    def plan(self) -> PagedPlan:
        return plan_attention(
            self.chunks,
            num_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[2],
            dtype=self.q.dtype,
            device=self.q.device,
        )

    def attend(self, plan: PagedPlan | None = None) -> Tensor:
        out = torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format)
        paged_attention(self.q, out, k=self.k, v=self.v, plan=plan or self.plan(), scale=self.scale)
        return out

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def expected(self) -> Tensor:
        """Return the definition, row by row in fp64."""
        group = self.q.shape[1] // self.k.shape[2]
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for chunk in self.chunks:
            k, v = (cells_of(cells, chunk).double().cpu() for cells in (self.k, self.v))
            for i in range(chunk.num_tokens):
                num_seen = chunk.context_len - chunk.num_tokens + i + 1
                q = self.q[chunk.row0 + i].double().cpu()
                seen_k = k[:num_seen].repeat_interleave(group, dim=1)
                seen_v = v[:num_seen].repeat_interleave(group, dim=1)
                p = torch.einsum("hd,nhd->hn", q, seen_k).mul(self.scale).softmax(-1)
                out[chunk.row0 + i] = torch.einsum("hn,nhd->hd", p, seen_v)
        return out


def cells_of(cells: Tensor, chunk: Chunk) -> Tensor:
    """Return the cells of a sequence's tokens in their order."""
    positions = torch.arange(chunk.context_len)
    blocks = torch.tensor(chunk.block_table)[positions // BLOCK_SIZE]
    return cells[blocks.to(cells.device), (positions % BLOCK_SIZE).to(cells.device)]


def world(
    *lengths: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype,
    device: torch.device,
) -> World:
    """Return a world of chunks (num_tokens, context_len), their blocks scattered."""
    num_heads, num_kv_heads = heads
    num_blocks = [-(-context // BLOCK_SIZE) for _, context in lengths]
    order = torch.randperm(sum(num_blocks) + 2, generator=torch.Generator().manual_seed(1))
    free = order.tolist()
    chunks, row0 = [], 0
    for (num_tokens, context_len), count in zip(lengths, num_blocks, strict=True):
        table = [free.pop() for _ in range(count)]
        chunks.append(
            Chunk(row0=row0, num_tokens=num_tokens, context_len=context_len, block_table=table)
        )
        row0 += num_tokens
    generator = torch.Generator().manual_seed(row0)
    shape = (len(order), BLOCK_SIZE, num_kv_heads, head_dim)
    k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for chunk in chunks:
        for position in range(chunk.context_len):
            cell = chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            k[cell] = torch.randn(shape[2:], generator=generator)
            v[cell] = torch.randn(shape[2:], generator=generator)
    # As the q part of a fused product's rows.
    wide = torch.randn(row0, num_heads + 2, head_dim, generator=generator)
    return World(
        chunks=chunks,
        q=wide.to(device=device, dtype=dtype)[:, 1:-1],
        k=k.to(device=device, dtype=dtype),
        v=v.to(device=device, dtype=dtype),
    )


def assert_attends(one: World, plan: PagedPlan | None = None) -> None:
    wanted = one.expected().to(device=one.q.device, dtype=one.q.dtype)
    torch.testing.assert_close(one.attend(plan), wanted, **TOLERANCES[one.q.dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_of_any_length_in_one_step(dtype: torch.dtype, device: torch.device) -> None:
    """Decodes, a whole prompt, the rest of one behind cached blocks; contexts that end anywhere."""
    lengths = [(1, 1), (1, 21), (5, 5), (3, 18), (1, 8), (40, 70)]
    assert_attends(world(*lengths, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
def test_query_heads_share_kv_heads(
    heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    assert_attends(world((1, 9), (6, 10), heads=heads, dtype=dtype, device=device))


@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
def test_heads_of_any_size(head_dim: int, device: torch.device) -> None:
    assert_attends(world((1, 9), (4, 6), head_dim=head_dim, dtype=torch.float32, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_splits", [2, 4])
def test_a_split_context_is_the_same_context(
    num_splits: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Also where there are more splits than positions, and where a chunk's rows are split."""
    one = world((1, 200), (1, 3), (3, 150), dtype=dtype, device=device)
    plan = one.plan()
    launches = tuple(replace(launch, num_splits=num_splits) for launch in plan.launches)
    assert_attends(one, replace(plan, launches=launches))


def test_few_long_sequences_are_split_and_many_are_not(device: torch.device) -> None:
    few = world((1, 600), dtype=torch.float32, device=device)
    assert [launch.num_splits for launch in few.plan().launches] == [2]
    assert_attends(few)
    many = world(*[(1, 600)] * 128, dtype=torch.float32, device=device)
    assert [launch.num_splits for launch in many.plan().launches] == [1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_result_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Bitwise, whether it goes with others or alone."""
    together = world((1, 30), (4, 12), (1, 7), (2, 9), dtype=dtype, device=device)
    out = together.attend()
    for chunk in together.chunks:
        rows = slice(chunk.row0, chunk.row0 + chunk.num_tokens)
        alone = replace(together, chunks=[replace(chunk, row0=0)], q=together.q[rows])
        assert torch.equal(alone.attend(), out[rows])


def test_more_sequences_than_the_bucket_of_a_graph(device: torch.device) -> None:
    for count, bucket in ((8, 8), (9, 16)):
        one = world(*[(1, 5)] * count, dtype=torch.float32, device=device)
        assert [launch.lines.shape[0] for launch in one.plan().launches] == [bucket]
        assert_attends(one)


def test_a_captured_plan_takes_another_ones_numbers(device: torch.device) -> None:
    """What a graph does: the tensors stay, their numbers change."""
    first = world((1, 9), (1, 5), (1, 12), dtype=torch.float32, device=device)
    second = world((1, 11), (1, 2), dtype=torch.float32, device=device)
    captured = first.plan()
    captured.take(second.plan())
    assert_attends(second, captured)
    longer = world((1, 70), dtype=torch.float32, device=device)
    with pytest.raises(AssertionError, match="plans of its own shape"):
        captured.take(longer.plan())
