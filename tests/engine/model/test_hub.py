"""Loading by hub id, through the real huggingface_hub client and HF_ENDPOINT."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model.loading import public_name
from tests.engine.model.checkpoints import random_model, save
from tests.engine.model.hub_double import Hub, hub_double

# A process of its own, because huggingface_hub reads its environment when it is imported.
FETCH = """
import json, sys
from engine.errors import InvalidModel
from engine.model.hub import fetch_from_hub
try:
    answer = {"directory": str(fetch_from_hub(sys.argv[1], progress=lambda text: None))}
except InvalidModel as error:
    answer = {"error": str(error)}
assert "torch" not in sys.modules, "asking the hub needs no torch"
print(json.dumps(answer))
"""
LOAD = """
import json, sys
from engine.config import EngineConfig
from engine.model.loading import load_model
config = EngineConfig(model=sys.argv[1], state_dir=sys.argv[1].replace("/", "-"))
loaded = load_model(config, progress=lambda text: None)
print(json.dumps({"base_id": loaded.base_id, "directory": str(loaded.model_dir)}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    good = save(random_model("smollm2"), tmp_path / "good", max_shard_size="60KB")
    (good / "pytorch_model.bin").write_bytes(b"never read")
    (good / "README.md").write_text("not needed")
    other = save(random_model("llama2"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (other / "config.json").write_text(json.dumps(config))
    with hub_double({"someone/good": good, "someone/other": other}) as running:
        yield running


def run(
    script: str, hub_id: str, *, endpoint: str, directory: Path, offline: bool = False
) -> dict[str, str]:
    env = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, hub_id],
        env=env,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_hub_id_is_a_model_and_its_base_id(hub: Hub, tmp_path: Path) -> None:
    loaded = run(LOAD, "someone/good", endpoint=hub.endpoint, directory=tmp_path)
    assert loaded["base_id"] == "someone/good"
    assert public_name(Path(loaded["directory"])) == "someone/good"


def test_a_checkpoint_is_downloaded_once_and_only_what_is_needed(hub: Hub, tmp_path: Path) -> None:
    first = run(FETCH, "someone/good", endpoint=hub.endpoint, directory=tmp_path)
    downloaded = hub.downloaded()
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= downloaded
    assert not {"pytorch_model.bin", "README.md"} & downloaded

    hub.asked.clear()
    again = run(FETCH, "someone/good", endpoint=hub.endpoint, directory=tmp_path)
    assert again == first
    assert not hub.downloaded(), "the second start reads the cache"

    hub.asked.clear()
    offline = run(FETCH, "someone/good", endpoint=hub.endpoint, directory=tmp_path, offline=True)
    assert offline == first
    assert not hub.asked


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    answer = run(FETCH, "someone/other", endpoint=hub.endpoint, directory=tmp_path)
    assert "MambaForCausalLM" in answer["error"]
    assert "Llama" in answer["error"]
    assert hub.downloaded() == {"config.json"}


def test_a_missing_tokenizer_is_refused_before_the_weights_are_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "good" / "tokenizer.json").unlink()
    answer = run(FETCH, "someone/good", endpoint=hub.endpoint, directory=tmp_path)
    assert "tokenizer.json" in answer["error"]
    assert hub.downloaded() == {"config.json"}


def test_an_unknown_hub_id_is_refused_in_words(hub: Hub, tmp_path: Path) -> None:
    answer = run(FETCH, "someone/nothing", endpoint=hub.endpoint, directory=tmp_path)
    assert "someone/nothing" in answer["error"]
    assert "hub" in answer["error"]


@pytest.mark.slow  # the hub's client tries again for 20 s
def test_an_unreachable_hub_is_said_in_words(tmp_path: Path) -> None:
    answer = run(FETCH, "someone/good", endpoint="http://127.0.0.1:9", directory=tmp_path)
    assert "can't be reached" in answer["error"]
