"""Grade E1 for every supported architecture: logits as transformers computes them, in fp32."""

import random
from pathlib import Path

import pytest
import torch

from tests.engine.model.checkpoints import (
    VARIANTS,
    VOCAB_SIZE,
    random_model,
    reference_logits,
    save,
)
from tests.engine.model.paged_run import load, paged_logits

MAX_GAP = 1e-3


def random_prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_several_chunked_sequences(
    variant: str, tmp_path: Path
) -> None:
    model = random_model(variant)
    loaded = load(save(model, tmp_path / "model"), tmp_path / "state")
    prompts = random_prompts([1, 5, 16, 70, 33])
    computed = paged_logits(loaded.decoder, prompts, chunk_sizes=(1, 1, 3, 8, 40))
    for prompt, logits in zip(prompts, computed, strict=True):
        expected = reference_logits(model, prompt)
        assert expected.std() > 0.3, "the reference says something"
        assert (logits - expected).abs().max() <= MAX_GAP


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 200])
def test_the_chunk_size_does_not_matter(chunk_size: int, tmp_path: Path) -> None:
    model = random_model("llama3")
    loaded = load(save(model, tmp_path / "model"), tmp_path / "state")
    (prompt,) = random_prompts([200])
    (logits,) = paged_logits(loaded.decoder, [prompt], chunk_sizes=(chunk_size,))
    assert (logits - reference_logits(model, prompt)).abs().max() <= MAX_GAP


def test_a_sharded_checkpoint_is_one_model(tmp_path: Path) -> None:
    model = random_model("qwen2")
    directory = save(model, tmp_path / "model", max_shard_size="60KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    loaded = load(directory, tmp_path / "state")
    (prompt,) = random_prompts([20])
    (logits,) = paged_logits(loaded.decoder, [prompt], chunk_sizes=(6,))
    assert (logits - reference_logits(model, prompt)).abs().max() <= MAX_GAP


def test_a_sliding_window_caps_the_context_so_that_it_never_matters(tmp_path: Path) -> None:
    model = random_model("mistral", sliding_window=24)
    loaded = load(save(model, tmp_path / "model"), tmp_path / "state")
    assert loaded.max_model_len == 24
    (prompt,) = random_prompts([24])
    (logits,) = paged_logits(loaded.decoder, [prompt], chunk_sizes=(5,))
    assert (logits - reference_logits(model, prompt)).abs().max() <= MAX_GAP


@pytest.mark.parametrize("variant", ["llama3", "llama-bias", "qwen3"])
def test_bf16_is_as_close_to_fp32_as_transformers_bf16(variant: str, tmp_path: Path) -> None:
    """In bf16 two right implementations differ, so both are held against the fp32 truth."""
    model = random_model(variant).to(torch.bfloat16)
    loaded = load(save(model, tmp_path / "model"), tmp_path / "state", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    prompts = random_prompts([60, 60, 60])
    ours = torch.cat(paged_logits(loaded.decoder, prompts, chunk_sizes=(1, 9)))
    theirs = torch.cat([reference_logits(model, prompt) for prompt in prompts])
    model.float()
    truth = torch.cat([reference_logits(model, prompt) for prompt in prompts])
    assert (ours - truth).abs().mean() <= 1.1 * (theirs - truth).abs().mean()


def test_fp16_weights_run_as_bf16(tmp_path: Path) -> None:
    directory = save(random_model("smollm2").to(torch.float16), tmp_path / "model")
    assert load(directory, tmp_path / "state", dtype="auto").dtype == torch.bfloat16
    assert load(directory, tmp_path / "state", dtype="fp32").dtype == torch.float32
