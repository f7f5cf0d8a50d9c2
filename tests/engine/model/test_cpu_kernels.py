"""A decoder on numba kernels computes what transformers does, over KV that is NaN elsewhere."""

from pathlib import Path

import pytest
import torch

from engine.assembly import module_specs
from engine.model.cpu_kernels import NumbaKernels
from engine.model.inputs import build_inputs
from engine.model.linear import PackedLinear, PrepackedLinear, prepack, unpacked
from engine.model.warm_up import warm_up
from engine.scheduler.plan import StepPlan
from punica_kernels import numba_lora
from tests.engine.model.checkpoints import random_model, reference_logits, save
from tests.engine.model.paged_run import (
    BLOCK_SIZE,
    chunk_of,
    kv_storage,
    load,
    new_sequence,
    paged_logits,
)
from tests.engine.model.test_matches_transformers import MAX_GAP, random_prompts

pytestmark = pytest.mark.slow  # numba compiles for each shape and format


@pytest.mark.parametrize("variant", ["llama3", "qwen3"])
def test_logits_equal_transformers_for_several_chunked_sequences(variant: str, tmp_path: Path):
    model = random_model(variant)
    directory = save(model, tmp_path / "model")
    loaded = load(directory, tmp_path / "state", kernels="numba")
    prompts = random_prompts([1, 5, 16, 70, 33])
    computed = paged_logits(loaded.decoder, prompts, chunk_sizes=(1, 1, 3, 8, 40))
    for prompt, logits in zip(prompts, computed, strict=True):
        assert (logits - reference_logits(model, prompt)).abs().max() <= MAX_GAP


@pytest.mark.parametrize("variant", ["llama3", "qwen3"])
def test_heads_of_whole_panels_attend_in_tiles(variant: str, tmp_path: Path):
    model = random_model(variant, head_dim=64)
    loaded = load(save(model, tmp_path / "m"), tmp_path / "s", kernels="numba", num_threads=3)
    assert isinstance(loaded.decoder.kernels, NumbaKernels)
    assert loaded.decoder.kernels.prefill is not None
    prompts = random_prompts([17, 90, 64, 5])
    computed = paged_logits(loaded.decoder, prompts, chunk_sizes=(1, 17, 70))
    for prompt, logits in zip(prompts, computed, strict=True):
        assert (logits - reference_logits(model, prompt)).abs().max() <= MAX_GAP


@pytest.mark.parametrize("kernel", ["add_segments", "add_segments_serially"])
def test_warming_up_runs_both_kernels_of_short_segments(kernel: str, tmp_path: Path, monkeypatch):
    """What isn't compiled then would be in the first request with several adapters."""
    loaded = load(save(random_model("llama3"), tmp_path / "m"), tmp_path / "s", kernels="numba")
    modules = [one for one in module_specs(loaded) if one.num_layers is None]
    calls = []
    real = getattr(numba_lora, kernel)
    monkeypatch.setattr(numba_lora, kernel, lambda *args: (calls.append(kernel), real(*args)))
    warm_up(loaded.decoder, modules, block_size=BLOCK_SIZE, progress=lambda _: None)
    assert calls


def test_in_bf16_it_is_as_close_to_the_plain_kernels_as_rounding_allows(tmp_path: Path):
    directory = save(random_model("llama3"), tmp_path / "model")
    prompts = random_prompts([1, 40, 90])
    truth, plain, fast = (
        paged_logits(
            load(directory, tmp_path / "state", dtype=dtype, kernels=kernels).decoder,
            prompts,
            chunk_sizes=(1, 3, 40),
        )
        for dtype, kernels in (("fp32", "torch"), ("bf16", "torch"), ("bf16", "numba"))
    )
    plain_gap = max((a - b).abs().max() for a, b in zip(truth, plain, strict=True))
    fast_gap = max((a - b).abs().max() for a, b in zip(truth, fast, strict=True))
    assert fast_gap <= 1.5 * plain_gap


@torch.inference_mode()
def test_attention_gathers_nothing_and_wipes_nothing(tmp_path: Path, monkeypatch):
    """Decode reads K and V where they lie, and a slot that isn't written is never read."""
    loaded = load(save(random_model("llama3"), tmp_path / "m"), tmp_path / "s", kernels="numba")
    decoder = loaded.decoder
    kv = kv_storage(decoder, num_blocks=40)
    monkeypatch.setattr(kv, "gather", lambda *_: pytest.fail("a gather"))
    monkeypatch.setattr(kv, "wipe", lambda *_: pytest.fail("a wipe"))
    seq = new_sequence("one", list(range(40)), list(range(10)))
    for size in (16, 16, 1, 1, 6):
        plan = StepPlan(chunks=(chunk_of(seq, size),))
        inputs = build_inputs(plan, block_size=BLOCK_SIZE, device=torch.device("cpu"))
        assert decoder.forward(inputs, kv, None).isfinite().all()
        seq.num_computed_tokens += size


def test_a_prepacked_weight_is_the_weight():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(torch.bfloat16)
    bias = torch.randn(96, generator=generator).to(torch.bfloat16)
    linear = unpacked(weight, bias)
    packed = prepack(linear)
    assert isinstance(packed, PrepackedLinear)
    assert packed.num_bytes == linear.num_bytes
    for num_rows in (1, 5, 33, 200):
        x = torch.randn(num_rows, 64, generator=generator).to(torch.bfloat16)
        got, expected = packed.product(x), linear.product(x)
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-4)


def test_a_library_that_computes_something_else_is_not_used(monkeypatch):
    linear = unpacked(torch.randn(8, 16).to(torch.bfloat16))
    monkeypatch.setattr(PrepackedLinear, "product", lambda self, x: x.new_zeros(x.shape[0], 8))
    assert prepack(linear) is linear


def test_fp32_stays_as_it_is():
    linear = unpacked(torch.randn(8, 16))
    assert prepack(linear) is linear
    assert isinstance(linear, PackedLinear)
