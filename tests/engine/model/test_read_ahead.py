"""What is fetched ahead is what will be read, and changes no product."""

import numpy as np
import pytest
import torch

from engine.model.linear import prepack, unpacked
from engine.model.panel_linear import PanelLinear
from engine.model.read_ahead import ReadAhead, lora_rows
from punica_kernels import numba_dots
from punica_kernels.arena import Arena, ModuleSpec, Span
from punica_kernels.numba_dots import LINE_BYTES, PIECE_LINES
from punica_kernels.words import PAIRS, words

PIECE_BYTES = LINE_BYTES * PIECE_LINES
MODULE = ModuleSpec(name="qkv", group="attention", in_features=576, slice_out_features=(576, 192))
NUM_LAYERS = 3
SPANS = [Span(row0=0, num_rows=16), Span(row0=16, num_rows=3), Span(row0=40, num_rows=64)]
RANKS = [[16, 16], [0, 3], [64, 8]]


@pytest.fixture
def arena() -> Arena:
    made = Arena(
        modules=[MODULE],
        num_layers=NUM_LAYERS,
        num_rows={"attention": 128},
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for lora_index, (span, ranks) in enumerate(zip(SPANS, RANKS, strict=True)):
        made.set_adapter(
            lora_index,
            spans={"attention": span},
            ranks={"qkv": [ranks] * NUM_LAYERS},
            scales={"qkv": [[1.0, 1.0]] * NUM_LAYERS},
        )
    return made


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_each_thread_fetches_the_rows_of_its_segments(arena: Arena, layer: int):
    owners = [2, 0, 1, 0]
    ahead = lora_rows(arena, "qkv", np.array(owners), np.array([0, 1, 4]))
    for thread, segments in enumerate((owners[:1], owners[1:])):
        begin, stop = ahead.starts[thread], ahead.starts[thread + 1]
        addresses = (ahead.pieces[:, 0] + layer * ahead.pieces[:, 1])[begin:stop].tolist()
        wanted = []
        for lora_index in segments:
            span, ranks = SPANS[lora_index], RANKS[lora_index]
            for index, rank in enumerate(ranks):
                a = arena.a("qkv")[layer, index, span.row0 : span.row0 + rank]
                wanted += range(a.data_ptr(), a.data_ptr() + a.nbytes, PIECE_BYTES)
            b = arena.b("qkv")[layer, span.row0 : span.row0 + max(ranks)]
            wanted += range(b.data_ptr(), b.data_ptr() + b.nbytes, PIECE_BYTES)
        assert addresses == wanted


@pytest.mark.slow  # numba compiles
@pytest.mark.skipif(numba_dots.problem() is not None, reason=numba_dots.problem() or "they run")
@pytest.mark.parametrize("num_pieces", [0, 1, 5, 400])
def test_a_product_is_the_same_whatever_is_fetched_beside_it(num_pieces: int):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(320, 576, generator=generator).to(torch.bfloat16)
    ours = prepack(unpacked(weight), PanelLinear.over)
    assert isinstance(ours, PanelLinear)
    memory = np.zeros(num_pieces * PIECE_BYTES, dtype=np.uint8)
    pieces = np.zeros((num_pieces, 2), dtype=np.int64)
    pieces[:, 0] = memory.ctypes.data + PIECE_BYTES * np.arange(num_pieces)
    num_threads = min(torch.get_num_threads(), 10)
    starts = np.linspace(0, num_pieces, num_threads + 1).astype(np.int64)
    for num_rows in (1, 16, 17, 32, 130):
        x = torch.randn(num_rows, 576, generator=generator).to(torch.bfloat16)
        got = torch.empty(num_rows, 320, dtype=torch.bfloat16)
        ahead = ReadAhead(pieces, starts)
        ours.multiply(words(x).view(PAIRS), words(got), ahead=ahead, layer=0)
        assert torch.equal(got, ours.product(x))
