"""What loading refuses in words, what it decides by itself, and what an identity is made of."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import InvalidModel
from engine.model.loading import load_model, public_name
from tests.engine.model.checkpoints import random_model, save
from tests.engine.model.paged_run import load

WEIGHTS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(random_model("llama2"), tmp_path / "tiny-llama")


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def change_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def refusal(directory: Path) -> str:
    with pytest.raises(InvalidModel) as caught:
        load(directory, directory.parent / "state")
    return str(caught.value)


def test_all_problems_of_the_tensors_are_named_at_once(checkpoint: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.extra.weight"] = torch.ones(3)
        tensors[Q_PROJ] = torch.ones(48, 47)

    change_weights(checkpoint, spoil)
    words = refusal(checkpoint)
    assert "model.norm.weight is missing" in words
    assert "layers.9.mlp.extra.weight is not part of LlamaForCausalLM" in words
    assert f"{Q_PROJ} has shape [48, 47], but config.json makes it [48, 48]" in words


def test_a_long_list_of_problems_is_cut_and_counted(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=40)
    assert "is missing; and 3" in refusal(checkpoint)


def test_weights_of_other_number_formats_are_refused(checkpoint: Path) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.float64)

    change_weights(checkpoint, cast)
    assert "stored as F64; supported are F32, F16, BF16" in refusal(checkpoint)


def test_a_tied_head_may_be_stored_twice_but_not_differ(tmp_path: Path) -> None:
    directory = save(random_model("smollm2"), tmp_path / "tied")

    def store_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_weights(directory, store_head)
    decoder = load(directory, tmp_path / "state").decoder
    assert decoder.lm_head.weight is decoder.embedding
    change_weights(directory, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert "head of its own" in refusal(directory)


def test_rotary_tables_of_old_checkpoints_are_ignored(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(checkpoint, lambda tensors: tensors.update({name: torch.ones(4)}))
    load(checkpoint, checkpoint.parent / "state")


def test_a_truncated_file_is_said_in_words(checkpoint: Path) -> None:
    path = checkpoint / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{WEIGHTS} can't be read as safetensors" in refusal(checkpoint)


def test_pickled_weights_are_never_read(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "pytorch_model.bin")
    assert "safe_serialization" in refusal(checkpoint)


def test_missing_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "no config.json" in refusal(checkpoint)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = save(random_model("qwen2"), tmp_path / "sharded", max_shard_size="60KB")
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(directory)


def test_an_index_cannot_point_outside_the_checkpoint(tmp_path: Path) -> None:
    directory = save(random_model("qwen2"), tmp_path / "sharded", max_shard_size="60KB")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    assert "outside the checkpoint" in refusal(directory)


@pytest.mark.parametrize("model", ["/no/such/place", "a/b/c", "missing.gguf", "", "../x"])
def test_no_such_model_is_said_in_one_line(model: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel) as caught:
        load_model(EngineConfig(model=model, state_dir=str(tmp_path)), progress=lambda text: None)
    assert "\n" not in str(caught.value)


def test_a_context_beyond_the_checkpoint_is_refused_with_both_numbers(checkpoint: Path) -> None:
    def loaded_for(max_model_len: int) -> int:
        config = EngineConfig(
            model=str(checkpoint), state_dir=str(checkpoint), max_model_len=max_model_len
        )
        return load_model(config, progress=lambda text: None).max_model_len

    assert loaded_for(100) == 100
    with pytest.raises(InvalidModel, match=r"257.*256"):
        loaded_for(257)


def test_end_tokens_of_the_generation_config_win(checkpoint: Path) -> None:
    state = checkpoint.parent / "state"
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    assert load(checkpoint, state).eos_token_ids == (2,)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load(checkpoint, state).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("models/llama-3.1-8b-instruct-Q5_K_M.gguf", "llama-3.1-8b-instruct"),
        ("models/tiny.gguf", "tiny"),
        ("models/my-llama", "my-llama"),
        (
            "hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/0123abcd",
            "HuggingFaceTB/SmolLM2-135M",
        ),
    ],
)
def test_the_public_name_never_holds_a_place(path: str, name: str) -> None:
    assert public_name(Path(path)) == name


def test_the_operators_name_wins(checkpoint: Path) -> None:
    config = EngineConfig(
        model=str(checkpoint), state_dir=str(checkpoint), served_model_name="house/llama"
    )
    assert load_model(config, progress=lambda text: None).base_id == "house/llama"


def identity(directory: Path, *, dtype: str = "fp32") -> str:
    return load(directory, directory.parent / "state", dtype=dtype).identity


def test_identity_is_of_content_not_of_place_or_name(checkpoint: Path, tmp_path: Path) -> None:
    copy = save(random_model("llama2"), tmp_path / "elsewhere" / "renamed")
    assert identity(copy) == identity(checkpoint)
    assert identity(checkpoint).startswith("sha256:")


def test_identity_changes_with_one_weight_with_dtype_and_with_rope(checkpoint: Path) -> None:
    seen = {identity(checkpoint), identity(checkpoint, dtype="bf16")}
    change_weights(checkpoint, lambda tensors: tensors["model.norm.weight"][3:4].add_(0.001))
    seen.add(identity(checkpoint))
    change_config(checkpoint, rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    seen.add(identity(checkpoint))
    assert len(seen) == 4


def test_files_are_hashed_once_and_again_when_they_change(checkpoint: Path) -> None:
    first = identity(checkpoint)
    cache = checkpoint.parent / "state" / "models" / "digests.json"
    known = json.loads(cache.read_text())
    assert len(known) == 1
    assert identity(checkpoint) == first
    assert json.loads(cache.read_text()) == known
    stat = (checkpoint / WEIGHTS).stat()
    os.utime(checkpoint / WEIGHTS, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert identity(checkpoint) == first
    assert len(json.loads(cache.read_text())) == 2
    cache.write_text("torn {")
    assert identity(checkpoint) == first
