"""Configs that people really upload, with a verdict each; see tests/data/adapter_configs."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.base_description import TARGET_GROUPS, BaseDescription
from adapters.matching import match_modules
from adapters.peft_config import read_config
from adapters.peft_format import EffectiveConfig
from adapters.validate import Inspection, inspect_directory
from tests.adapters.worlds import TINY_MODULES, safetensors_bytes, tensor_name, tiny_base

CORPUS = Path(__file__).parents[1] / "data" / "adapter_configs"
_ROW = re.compile(
    r"^\| `(?P<file>[^`]+)` \| (?P<kind>[^|]+) \| (?P<verdict>\w+) \| (?P<why>.+) \|$"
)
ROWS = [
    m.groupdict() for m in map(_ROW.match, (CORPUS / "README.md").read_text().splitlines()) if m
]

# Refused only when the weights are seen: the config alone looks like a Llama adapter's.
SHOWN_BY_TENSORS = {
    "hand-made-minimal-eight-keys-01.json": "shapes",
    "gemma3-270m-relative-path-01.json": "shapes",
    "llava-med-mistral-01.json": "names",
    "llama32-vision-cot-01.json": "names",
    "qwen25vl-local-01.json": "names",
    "qwen3vl-attn-01.json": "names",
    "churro-3b-peft020-01.json": "names",
    "paligemma-01.json": "names",
}


def files_of(verdict: str) -> list[str]:
    return [row["file"] for row in ROWS if row["verdict"] == verdict]


def base_for(raw: dict[str, Any]) -> BaseDescription:
    """A base of 32 layers of the class that the config was trained on, if it is served at all."""
    mapping = raw.get("auto_mapping") or {}
    name = str(raw.get("base_model_name_or_path")).lower()
    architecture = "LlamaForCausalLM"
    for family in ("Qwen3", "Qwen2", "Mistral"):
        if family in str(mapping.get("base_model_class")) or family.lower() in name:
            architecture = f"{family}ForCausalLM"
    return tiny_base(num_layers=32, architecture=architecture)


def weights_for(config: EffectiveConfig, base: BaseDescription) -> dict[str, np.ndarray]:
    """The tensors that the config promises on this base, and those of targets it doesn't know."""
    keys = {
        tensor_name(layer, target, "A")
        .removeprefix("base_model.model.")
        .removesuffix(".lora_A.weight"): (layer, target)
        for layer in range(base.num_layers)
        for target in TARGET_GROUPS
    }
    arrays: dict[str, np.ndarray] = {}
    matching = match_modules(config, [*keys, "lm_head", "model.embed_tokens"])
    for key, setting in matching.settings.items():
        if key not in keys:
            arrays |= outside_weights(key, setting.rank, base)
            continue
        layer, target = keys[key]
        shape = TINY_MODULES[target]
        arrays[tensor_name(layer, target, "A")] = np.ones(
            (setting.rank, shape.in_features), np.float32
        )
        arrays[tensor_name(layer, target, "B")] = np.ones(
            (shape.out_features, setting.rank), np.float32
        )
    return arrays


def outside_weights(key: str, rank: int, base: BaseDescription) -> dict[str, np.ndarray]:
    """The factors of an embedding or a head, as PEFT names them."""
    factors = {"A": "lora_A.weight", "B": "lora_B.weight"}
    if key.endswith("embed_tokens"):
        factors = {side: f"lora_embedding_{side}" for side in "AB"}
    shape = base.shape_of(key.rpartition(".")[2])
    return {
        f"base_model.model.{key}.{factors['A']}": np.ones((rank, shape.in_features), np.float32),
        f"base_model.model.{key}.{factors['B']}": np.ones((shape.out_features, rank), np.float32),
    }


def foreign_weights(config: EffectiveConfig) -> dict[str, np.ndarray]:
    """What the adapter's own base has beside Llama's modules: tensors of the unknown targets."""
    targets = () if isinstance(config.target_modules, str) else config.target_modules
    return {
        f"base_model.model.model.layers.0.mixer.{target}.lora_{side}.weight": np.ones(
            (4, 4), np.float32
        )
        for target in targets
        if target not in TARGET_GROUPS and target != "query_key_value"
        for side in "AB"
    }


def inspect(
    folder: Path, raw: bytes, base: BaseDescription, arrays: dict[str, np.ndarray]
) -> Inspection:
    (folder / "adapter_config.json").write_bytes(raw)
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(arrays))
    return inspect_directory(folder, base)


def test_the_corpus_is_whole() -> None:
    assert {row["file"] for row in ROWS} == {path.name for path in CORPUS.glob("*.json")}
    assert [len(files_of(verdict)) for verdict in ("apply", "conditional", "refuse")] == [32, 9, 51]


@pytest.mark.parametrize("file", files_of("apply"))
def test_a_sound_config_is_applied_on_its_base(file: str, tmp_path: Path) -> None:
    raw = (CORPUS / file).read_bytes()
    reading = read_config(raw)
    assert reading.problems == ()
    assert reading.config is not None
    fields = json.loads(raw)
    base = base_for(fields)

    inspection = inspect(tmp_path, raw, base, weights_for(reading.config, base))

    assert inspection.problems == ()
    assert inspection.adapter is not None
    expected_scale = fields["lora_alpha"] / fields["r"]
    assert {lora.scale for lora in inspection.adapter.loras} == {expected_scale}
    wanted_layers = fields.get("layers_to_transform") or list(range(base.num_layers))
    assert len(inspection.adapter.loras) == len(wanted_layers) * len(
        TARGET_GROUPS.keys() & set(fields["target_modules"])
    )


@pytest.mark.parametrize("file", files_of("refuse"))
def test_a_config_of_another_world_is_refused_in_words(file: str, tmp_path: Path) -> None:
    raw = (CORPUS / file).read_bytes()
    base = tiny_base(num_layers=32)
    config = read_config(raw).config
    arrays = {} if config is None else weights_for(config, base) | foreign_weights(config)
    kind = SHOWN_BY_TENSORS.get(file)
    if kind == "shapes":
        arrays = {name: np.ones((4, 640), np.float32) for name in arrays}
    elif kind == "names":
        arrays = {
            name.replace("model.layers", "model.language_model.layers"): array
            for name, array in arrays.items()
        }

    inspection = inspect(tmp_path, raw, base, arrays)

    assert inspection.adapter is None
    assert inspection.problems
    assert all(len(problem) > 20 for problem in inspection.problems)


@pytest.mark.parametrize("file", files_of("conditional"))
def test_an_uncertain_config_is_applied_fully_or_refused_by_name(file: str, tmp_path: Path) -> None:
    raw = (CORPUS / file).read_bytes()
    fields = json.loads(raw)
    refused_by = {
        "modules-to-save-both-partial-mapping-01.json": ("modules_to_save",),
        "rank-and-alpha-pattern-01.json": ("peft_type",),
        "dora-minimal-01.json": ("use_dora",),
    }
    config = read_config(raw).config
    base = base_for(fields)
    arrays = {} if config is None else weights_for(config, base)

    inspection = inspect(tmp_path, raw, base, arrays)

    if file in refused_by:
        for name in refused_by[file]:
            assert any(name in problem for problem in inspection.problems)
    else:
        assert inspection.problems == ()
        assert inspection.adapter is not None
        if file.startswith("japanese"):
            assert inspection.adapter.targets[-2:] == ("embed_tokens", "lm_head")


@pytest.mark.parametrize("file", [f for f in files_of("apply") if f.startswith("qwen")])
def test_an_adapter_of_another_class_is_refused_where_the_config_shows_it(
    file: str, tmp_path: Path
) -> None:
    raw = (CORPUS / file).read_bytes()
    config = read_config(raw).config
    assert config is not None
    base = tiny_base(num_layers=32, architecture="LlamaForCausalLM")

    inspection = inspect(tmp_path, raw, base, weights_for(config, base))

    if config.base_model_class is not None:
        assert any("auto_mapping" in problem for problem in inspection.problems)
    else:
        assert any("names prove little" in warning for warning in inspection.warnings)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("git-lfs-pointer-01.json", "git lfs pull"),
        ("mlx-smollm2-360m-01.json", "MLX-LM"),
        ("mlx-old-lora-layers-minus1-01.json", "MLX-LM"),
        ("adapter-hub-bottleneck-01.json", "AdapterHub"),
        ("prompt-tuning-bare-01.json", "only LoRA"),
        ("gpt2-conv1d-auto-mapping-01.json", "fan_in_fan_out"),
        ("target-parameters-moe-01.json", "target_parameters"),
        ("nllb-seq2seq-01.json", "SEQ_2_SEQ_LM"),
        ("one-key-base-only-01.json", "no peft_type"),
    ],
)
def test_the_words_fit_the_file(file: str, words: str) -> None:
    problems = read_config((CORPUS / file).read_bytes()).problems
    assert any(words in problem for problem in problems), problems


def test_a_target_that_means_nothing_is_noted(tmp_path: Path) -> None:
    raw = (CORPUS / "enable-lora-null-extra-target-01.json").read_bytes()
    config = read_config(raw).config
    assert config is not None
    base = tiny_base(num_layers=32)

    inspection = inspect(tmp_path, raw, base, weights_for(config, base))

    assert any("query_key_value" in note for note in inspection.notes)
    assert any("enable_lora" in note for note in inspection.notes) is False
