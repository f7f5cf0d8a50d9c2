"""GGUF files become the model that they were made from, or are refused in words."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import engine.model.gguf as gguf_module
from engine.errors import InvalidModel
from engine.model.rotary import inverse_frequencies
from engine.model.spec import RopeKind, RopeSpec
from tests.engine.model.checkpoints import VOCAB_SIZE, random_model, reference_logits
from tests.engine.model.gguf_files import vocabulary, write_gguf
from tests.engine.model.paged_run import load, paged_logits

PROMPT = [5, 17, 99, 3, 3, 42, 180, 7, 21, 60, 11]
MAX_GAP = 1e-3


def gap_to_original(variant: str, directory: Path, **options: Any) -> float:
    model = random_model(variant)
    loaded = load(write_gguf(model, directory / "tiny.gguf", **options), directory / "state")
    (logits,) = paged_logits(loaded.decoder, [PROMPT], chunk_sizes=(1, 4))
    return float((logits - reference_logits(model, PROMPT)).abs().max())


@pytest.mark.parametrize("variant", ["llama2", "smollm2", "llama-bias", "qwen2", "qwen3"])
def test_logits_equal_the_original_model(variant: str, tmp_path: Path) -> None:
    assert gap_to_original(variant, tmp_path) <= MAX_GAP


@pytest.mark.parametrize("variant", ["smollm2", "llama-bias"])
def test_leaving_q_and_k_permuted_would_be_noticed(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_module, "unpermuted", lambda rows, num_heads: rows)
    assert gap_to_original(variant, tmp_path) > 100 * MAX_GAP


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_floats_keep_their_format(kind: str, tmp_path: Path) -> None:
    model = random_model("smollm2")
    path = write_gguf(model, tmp_path / "tiny.gguf", quantisation=gguf.GGMLQuantizationType[kind])
    loaded = load(path, tmp_path / "state")
    half = torch.float16 if kind == "F16" else torch.bfloat16
    expected = model.model.layers[1].self_attn.q_proj.weight.to(half).float()
    q_rows = loaded.decoder.layers[1].weights.qkv.weight[: expected.shape[0]]
    assert torch.equal(q_rows, expected)


def llama3_divisors(factor: float, head_dim: int) -> np.ndarray:
    plain = RopeSpec(kind=RopeKind.DEFAULT, theta=10000.0)
    stretched = RopeSpec(kind=RopeKind.LLAMA3, theta=10000.0, factor=factor)
    return (inverse_frequencies(plain, head_dim) / inverse_frequencies(stretched, head_dim)).numpy()


def converted_config(path: Path, state_dir: Path) -> dict[str, Any]:
    return json.loads((load(path, state_dir).model_dir / "config.json").read_text())


def test_llama3_stretching_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    model = random_model("llama2", head_dim=32)
    divisors = llama3_divisors(32.0, 32)
    path = write_gguf(model, tmp_path / "a.gguf", extra_tensors={"rope_freqs.weight": divisors})
    rope = converted_config(path, tmp_path / "state")["rope_parameters"]
    assert rope == {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = llama3_divisors(32.0, 8)
    divisors[1] += 0.5
    path = write_gguf(
        random_model("llama2"), tmp_path / "a.gguf", extra_tensors={"rope_freqs.weight": divisors}
    )
    with pytest.raises(InvalidModel, match="rope_freqs"):
        load(path, tmp_path / "state")


def test_linear_scaling_is_kept(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(random_model("llama2"), tmp_path / "a.gguf", keys=keys)
    rope = converted_config(path, tmp_path / "state")["rope_parameters"]
    assert rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokenizer.ggml.pre": "brandnew"}, "'brandnew'.*smollm, gpt-2, default, llama-bpe"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'.*SentencePiece"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 4}, r"layers\.3\..* is missing"),
        ({"split.count": 2}, "one part of several"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused(
    keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_gguf(random_model("llama2"), tmp_path / "a.gguf", keys=keys)
    with pytest.raises(InvalidModel, match=words):
        load(path, tmp_path / "state")


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(random_model("llama2"), tmp_path / "a.gguf", architecture="gemma2")
    with pytest.raises(InvalidModel, match=r"'gemma2'.*Llama"):
        load(path, tmp_path / "state")


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(6, dtype=np.float32)}
    path = write_gguf(random_model("llama2"), tmp_path / "a.gguf", extra_tensors=extra)
    with pytest.raises(InvalidModel, match="attn_sinks"):
        load(path, tmp_path / "state")


@pytest.mark.parametrize("num_bytes", [0, 3, 200, 30_000])
def test_a_truncated_file_is_refused_and_leaves_nothing(num_bytes: int, tmp_path: Path) -> None:
    path = write_gguf(random_model("llama2"), tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(InvalidModel, match=r"a\.gguf"):
        load(path, tmp_path / "state")
    left = {entry.suffix for entry in (tmp_path / "state" / "models").iterdir()}
    assert left == {".json", ".lock"}


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    path = write_gguf(random_model("smollm2"), tmp_path / "a.gguf")
    first = load(path, tmp_path / "state")
    weights = first.model_dir / "model.safetensors"
    made_ns = weights.stat().st_mtime_ns
    again = load(path, tmp_path / "state")
    assert again.model_dir == first.model_dir
    assert again.identity == first.identity
    assert weights.stat().st_mtime_ns == made_ns


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    path = write_gguf(random_model("smollm2"), tmp_path / "a.gguf")
    directory = load(path, tmp_path / "state").model_dir
    directory.rename(directory.with_name(f".{directory.name}-killed"))
    assert load(path, tmp_path / "state").model_dir == directory
    directories = [entry for entry in directory.parent.iterdir() if entry.is_dir()]
    assert directories == [directory]


def test_a_state_folder_that_cannot_be_written_is_said_in_words(tmp_path: Path) -> None:
    path = write_gguf(random_model("smollm2"), tmp_path / "a.gguf")
    (tmp_path / "state").write_text("a file, not a folder")
    with pytest.raises(InvalidModel, match=r"a\.gguf can't be converted"):
        load(path, tmp_path / "state")


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tokens, types = vocabulary(VOCAB_SIZE + 1)
    keys = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
    }
    path = write_gguf(random_model("smollm2"), tmp_path / "a.gguf", keys=keys)
    with pytest.raises(InvalidModel, match=r"212 tokens.*211"):
        load(path, tmp_path / "state")


def test_end_tokens_come_from_the_file(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 4}
    path = write_gguf(random_model("smollm2"), tmp_path / "a.gguf", keys=keys)
    assert load(path, tmp_path / "state").eos_token_ids == (2, 4)
