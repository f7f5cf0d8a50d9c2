"""The committed demo adapters and data are what the demo and its README say they are."""

import json
import tempfile
from pathlib import Path

import pytest

from adapters.base_description import BaseDescription, LinearShape
from adapters.validate import inspect_directory

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO_FOLDERS = [EXAMPLES / "adapters" / name for name in ("brief", "json", "pirate")]
FOLDERS = [*DEMO_FOLDERS, EXAMPLES / "adapter_updates" / "pirate"]
MAX_BYTES = 2_000_000


def config_of(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.fixture(scope="module")
def default_base() -> BaseDescription:
    """SmolLM2-135M's module table."""
    shapes = {
        "q_proj": (576, 576),
        "k_proj": (576, 192),
        "v_proj": (576, 192),
        "o_proj": (576, 576),
        "gate_proj": (576, 1536),
        "up_proj": (576, 1536),
        "down_proj": (1536, 576),
    }
    return BaseDescription(
        base_id="SmolLM2-135M-Instruct",
        identity="sha256:" + "0" * 64,
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden=576,
        vocab_size=49152,
        max_model_len=8192,
        tie_word_embeddings=True,
        modules={
            name: LinearShape(in_features=num_in, out_features=num_out)
            for name, (num_in, num_out) in shapes.items()
        },
    )


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}"
)
def test_each_folder_is_an_adapter_for_the_default_base(
    folder: Path, default_base: BaseDescription
) -> None:
    inspection = inspect_directory(folder, default_base)

    assert inspection.problems == ()
    assert inspection.adapter is not None


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}"
)
def test_each_folder_is_two_small_files_without_a_machine_path(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert (folder / "adapter_model.safetensors").stat().st_size <= MAX_BYTES
    assert config_of(folder)["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    for path in folder.iterdir():
        content = path.read_bytes()
        checkout = str(Path(__file__).parents[2]).encode()
        scratch = tempfile.gettempdir().encode()
        traces = (b"/home/", b"/Users/", b"site-pack", checkout, scratch)
        assert not any(trace in content for trace in traces)


def test_the_demo_adapters_differ_in_rank_and_targets() -> None:
    configs = [config_of(folder) for folder in DEMO_FOLDERS]

    assert len({config["r"] for config in configs}) == 3
    assert len({tuple(config["target_modules"]) for config in configs}) == 3


def test_serve_finds_exactly_the_three_demo_adapters() -> None:
    found = sorted(path.parent.name for path in EXAMPLES.glob("adapters/*/adapter_config.json"))

    assert found == ["brief", "json", "pirate"]
