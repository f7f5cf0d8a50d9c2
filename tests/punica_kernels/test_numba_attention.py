"""Paged attention by numba: every unit sees its own keys and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from punica_kernels.numba_attention import TILE_KEYS, WHOLE_ROW, HeadShape, attention_kernels
from punica_kernels.words import words

pytestmark = pytest.mark.slow  # numba compiles for each shape and format

SHAPE = HeadShape(num_heads=6, num_kv_heads=2, head_dim=16)
WIDTH, KV_WIDTH, BLOCK_SIZE, NUM_BLOCKS = 6 * 16, 2 * 16, 4, 200
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = np.float32(1e-5)
NO_JOINS = np.zeros((0, 3), dtype=np.int64)


class World:
    """Sequences of given context lengths over shuffled blocks; every other cell is NaN.

    Row i is the newest token of sequence i; its own K and V aren't stored yet.
    """

    def __init__(self, contexts: list[int], dtype: torch.dtype) -> None:
        self.dtype, self.contexts = dtype, contexts
        generator = torch.Generator().manual_seed(len(contexts))
        shape = (NUM_BLOCKS, BLOCK_SIZE, 2, 16)
        self.k = torch.full(shape, torch.nan, dtype=dtype)
        self.v = torch.full(shape, torch.nan, dtype=dtype)
        ids = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(-(-n // BLOCK_SIZE))] for n in contexts]
        for table, num_tokens in zip(self.tables, contexts, strict=True):
            for cells in (self.k, self.v):
                rows = torch.randn(num_tokens - 1, 2, 16, generator=generator).to(dtype)
                for position, row in enumerate(rows):
                    cells[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = row
        self.qkv = torch.randn(len(contexts), WIDTH + 2 * KV_WIDTH, generator=generator).to(dtype)
        self.positions = np.array([n - 1 for n in contexts], dtype=np.int64)
        self.kv_slots = np.array(
            [
                table[(n - 1) // BLOCK_SIZE] * BLOCK_SIZE + (n - 1) % BLOCK_SIZE
                for table, n in zip(self.tables, contexts, strict=True)
            ],
            dtype=np.int64,
        )
        angles = torch.arange(1000)[:, None] / 100 ** (torch.arange(8) / 8)
        self.cos, self.sin = angles.cos().to(dtype).float(), angles.sin().to(dtype).float()
        self.norm = torch.zeros(0, 0, dtype=dtype)

    def place(self) -> tuple:
        cells = (words(self.k).reshape(-1), words(self.v).reshape(-1))
        tables = (words(self.cos), words(self.sin), words(self.norm))
        return (self.positions, self.kv_slots, *tables, EPS, *cells)

    def attend(self, units: list[tuple], *, joins: np.ndarray = NO_JOINS, num_partials: int = 0):
        width = max(len(table) for table in self.tables)
        tables = np.array([table + [-1] * (width - len(table)) for table in self.tables], np.int32)
        out = torch.full((len(self.contexts), WIDTH), torch.nan, dtype=self.dtype)
        middle = len(units) // 2
        attention_kernels(SHAPE).attend(
            words(self.qkv),
            np.array(units, dtype=np.int64),
            np.array([0, middle, len(units)], dtype=np.int64),
            tables,
            BLOCK_SIZE,
            *self.place(),
            np.full((2, SHAPE.scratch_len), np.nan, dtype=np.float32),
            np.full((num_partials, SHAPE.partial_len), np.nan, dtype=np.float32),
            joins,
            words(out),
        )
        return out

    def expected(self) -> torch.Tensor:
        """Return what one row at a time in fp32 gives, with q and k turned and rounded."""
        out = torch.empty(len(self.contexts), WIDTH)
        for row, table in enumerate(self.tables):
            heads = self.qkv[row].view(10, 16)
            turned = self.turn(heads[:8], int(self.positions[row]))
            k = torch.cat((self.cells(self.k, table)[: self.positions[row]], turned[None, 6:]))
            v = torch.cat((self.cells(self.v, table)[: self.positions[row]], heads[None, 8:]))
            for head in range(6):
                scores = k[:, head // 3].float() @ turned[head].float() / 4
                out[row, head * 16 : head * 16 + 16] = scores.softmax(0) @ v[:, head // 3].float()
        return out.to(self.dtype)

    @staticmethod
    def cells(storage: torch.Tensor, table: list[int]) -> torch.Tensor:
        return storage[table].flatten(0, 1)

    def turn(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        if self.norm.numel():
            rms = heads.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
            heads = (heads.float() * rms).to(self.dtype) * self.norm
        cos, sin = (table[position].to(self.dtype) for table in (self.cos, self.sin))
        first, second = heads[:, :8], heads[:, 8:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def whole_rows(world: World) -> list[tuple]:
    return [(row, row, 0, n, 1, WHOLE_ROW) for row, n in enumerate(world.contexts)]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if got.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


contexts = st.lists(st.integers(1, TILE_KEYS + 5), min_size=1, max_size=5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(contexts=contexts)
def test_fresh_rows_are_turned_stored_and_attended(dtype, contexts):
    world = World(contexts, dtype)
    expected = world.expected()
    got = world.attend(whole_rows(world))
    assert_close(got, expected)
    turned = world.qkv.view(-1, 10, 16)
    for row, slot in enumerate(world.kv_slots):
        assert torch.equal(world.k.view(-1, 2, 16)[slot], turned[row, 6:8])
        assert torch.equal(world.v.view(-1, 2, 16)[slot], turned[row, 8:])
    stored = sum(contexts) * KV_WIDTH
    assert int(world.k.isnan().sum()) == world.k.numel() - stored, "no other cell is written"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(context=st.integers(5, 600), num_parts=st.integers(2, 4))
def test_a_row_in_parts_is_the_row(dtype, context, num_parts):
    world = World([context], dtype)
    expected = world.expected()
    attention_kernels(SHAPE).rotate(words(world.qkv), np.zeros(1, dtype=np.int64), *world.place())
    cuts = [context * part // num_parts for part in range(num_parts + 1)]
    units = [(0, 0, cuts[part], cuts[part + 1], 0, part) for part in range(num_parts)]
    joins = np.array([[0, 0, num_parts]], dtype=np.int64)
    assert_close(world.attend(units, joins=joins, num_partials=num_parts), expected)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_q_and_k_are_normed_per_head(dtype):
    world = World([7, 30], dtype)
    world.norm = torch.rand(8, 16, generator=torch.Generator().manual_seed(5)).to(dtype) + 0.5
    expected = world.expected()
    assert_close(world.attend(whole_rows(world)), expected)


def test_nan_of_one_sequence_reaches_no_other():
    world = World([9, 40, 3], torch.float32)
    world.v[world.tables[1][0], 0] = torch.nan
    got = world.attend(whole_rows(world))
    assert got.isnan().any(dim=1).tolist() == [False, True, False]


def test_a_rows_result_does_not_depend_on_its_neighbours():
    together, alone = World([50, 20, 130], torch.bfloat16), World([50, 20, 130], torch.bfloat16)
    got = together.attend(whole_rows(together))
    one = alone.attend([whole_rows(alone)[2]])
    assert torch.equal(got[2], one[2])


def test_large_scores_do_not_overflow():
    world = World([40], torch.float32)
    world.qkv.mul_(100)
    expected = world.expected()
    assert_close(world.attend(whole_rows(world)), expected)
