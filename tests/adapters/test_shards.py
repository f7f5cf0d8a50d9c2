"""Weights that were cut into shards, and names that wrappers have marked."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from adapters.digest import adapter_digest
from adapters.folder import select_files
from adapters.shards import find_shards
from adapters.store import AdapterStore
from adapters.validate import inspect_directory
from tests.adapters.worlds import (
    config,
    safetensors_bytes,
    tensor_name,
    tensors,
    tiny_base,
    write_adapter,
)

INDEX = "adapter_model.safetensors.index.json"


def shard(number: int, total: int) -> str:
    return f"adapter_model-{number:05d}-of-{total:05d}.safetensors"


def write_shards(folder: Path, num_shards: int = 3, *, index: bool = True) -> Path:
    """Write the usual adapter with its tensors dealt out."""
    write_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    names = list(tensors())
    weight_map = {}
    for number in range(1, num_shards + 1):
        held = {name: tensors()[name] for name in names[number - 1 :: num_shards]}
        (folder / shard(number, num_shards)).write_bytes(safetensors_bytes(held))
        weight_map |= dict.fromkeys(held, shard(number, num_shards))
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_the_same_version_as_one_file(tmp_path: Path, index: bool) -> None:
    whole = inspect_directory(write_adapter(tmp_path / "whole"), tiny_base())
    cut = inspect_directory(write_shards(tmp_path / "cut", index=index), tiny_base())

    assert cut.problems == ()
    assert cut.adapter is not None
    assert whole.adapter is not None
    assert adapter_digest(cut.adapter) == adapter_digest(whole.adapter)
    assert cut.adapter.num_bytes == whole.adapter.num_bytes


def test_the_store_keeps_every_shard(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    with store.staging() as room:
        folder = write_shards(room / "adapter")
        manifest = store.put(folder, inspect_directory(folder, tiny_base()), tiny_base())
    store.check_invariants()
    again = inspect_directory(store.path_of(manifest.digest), tiny_base())
    assert again.adapter is not None
    assert adapter_digest(again.adapter) == manifest.digest


def test_an_upload_takes_shards_and_their_index() -> None:
    members = ["out/adapter_config.json", f"out/{INDEX}", "out/README.md"]
    members += [f"out/{shard(number, 2)}" for number in (1, 2)]
    selection = select_files(members)
    assert selection.problems == ()
    assert set(selection.taken.values()) == {
        "adapter_config.json",
        INDEX,
        shard(1, 2),
        shard(2, 2),
    }
    assert selection.skipped == ("out/README.md",)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([shard(1, 3), shard(3, 3)], "1 of them are missing (number 2 first)"),
        ([shard(1, 2), shard(1, 3)], "different sets"),
        ([shard(1, 1), "adapter_model.safetensors"], "isn't guessed"),
        (["adapter_model-00001-of-99999.safetensors"], "at most 256"),
        (["adapter_model-1-of-2.safetensors"], "unusual name"),
        ([INDEX], "unusual name"),
    ],
)
def test_what_is_doubtful_about_shards_is_said(weights: list[str], words: str) -> None:
    (problem,) = select_files(["adapter_config.json", *weights]).problems
    assert words in problem


def test_a_shard_that_is_missing_is_said_of_a_folder_too(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    (folder / shard(2, 3)).unlink()
    assert any("number 2 first" in p for p in inspect_directory(folder, tiny_base()).problems)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": shard(1, 3)}, "names tensors that its shards don't hold: extra"),
        (None, "doesn't name tensors that its shards hold"),
    ],
)
def test_an_index_must_agree_with_its_shards(
    tmp_path: Path, change: Mapping[str, str] | None, words: str
) -> None:
    folder = write_shards(tmp_path)
    fields = json.loads((folder / INDEX).read_text())
    if change is None:
        del fields["weight_map"][next(iter(fields["weight_map"]))]
    else:
        fields["weight_map"] |= change
    (folder / INDEX).write_text(json.dumps(fields))
    assert any(words in problem for problem in inspect_directory(folder, tiny_base()).problems)


@pytest.mark.parametrize("raw", ["[]", "{}", "nonsense", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(tmp_path: Path, raw: str) -> None:
    folder = write_shards(tmp_path)
    (folder / INDEX).write_text(raw)
    assert any(INDEX in problem for problem in inspect_directory(folder, tiny_base()).problems)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, index=False)
    name, array = next(iter(tensors().items()))
    (folder / shard(3, 3)).write_bytes(safetensors_bytes({name: array}))
    assert any("the same factor" in p for p in inspect_directory(folder, tiny_base()).problems)


def test_no_shards_are_no_problem() -> None:
    assert find_shards(["README.md"]).names == ()


def marked(name: str, how: str) -> str:
    match how:
        case "ddp":
            return f"module.{name}"
        case "compiled":
            return f"_orig_mod.{name}"
        case "compiled inside":
            return name.replace("base_model.model.", "base_model.model._orig_mod.")
        case "fsdp":
            return name.replace(".layers.", "._fsdp_wrapped_module.layers.").replace(
                ".self_attn", "._fsdp_wrapped_module.self_attn"
            )
    return name.replace(".self_attn", "._checkpoint_wrapped_module.self_attn")


@pytest.mark.parametrize("how", ["ddp", "compiled", "compiled inside", "fsdp", "checkpointed"])
def test_marks_of_wrappers_in_names_change_nothing(tmp_path: Path, how: str) -> None:
    """As trainers leave them that save their own state instead of the adapter's."""
    arrays = {marked(name, how): array for name, array in tensors().items()}
    inspection = inspect_directory(write_adapter(tmp_path, config(), arrays), tiny_base())
    assert inspection.problems == ()
    assert inspection.adapter is not None
    assert len(inspection.adapter.loras) == 4


def test_two_names_of_one_factor_are_refused(tmp_path: Path) -> None:
    name = tensor_name(0, "q_proj", "A")
    arrays = tensors() | {f"_orig_mod.{name}": np.ones((4, 16), np.float32)}
    inspection = inspect_directory(write_adapter(tmp_path, config(), arrays), tiny_base())
    assert any("the same factor" in problem for problem in inspection.problems)
