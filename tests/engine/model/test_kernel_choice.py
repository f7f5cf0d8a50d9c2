"""Which device and which kernels an engine gets, and in which words it is refused."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import InvalidModel
from engine.model import kernel_choice
from engine.model.device import open_device
from engine.model.kernel_choice import choose_kernels
from engine.model.loading import load_model

pytest.importorskip("triton")

CUDA = torch.device("cuda", 0)  # only a name here


def set_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)


def test_cuda_without_a_cuda_torch_is_refused_in_one_line_and_never_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    config = EngineConfig(model=str(tmp_path), state_dir=str(tmp_path), device="cuda")
    with pytest.raises(InvalidModel, match="built without CUDA") as caught:
        load_model(config, progress=lambda _text: None)
    assert "\n" not in str(caught.value)


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidModel, match="finds no CUDA device"):
        open_device("cuda")


def test_a_device_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device must be cpu or cuda, not 'tpu'"):
        EngineConfig(model="m", state_dir=str(tmp_path), device="tpu")


def test_cuda_takes_triton_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    set_capability(monkeypatch, (9, 0))
    for asked in ("auto", "triton"):
        assert choose_kernels(asked, num_threads=1, device=CUDA).name == "triton"


def test_an_old_device_gets_plain_torch_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    set_capability(monkeypatch, (7, 5))
    choice = choose_kernels("auto", num_threads=1, device=CUDA)
    assert choice.name == "torch"
    assert "7.5" in choice.reason
    with pytest.raises(InvalidModel, match=r"triton kernels can't run here.*7\.5"):
        choose_kernels("triton", num_threads=1, device=CUDA)


def test_each_device_is_asked_for_its_own_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on the second device is not refused for what the first one lacks."""
    capabilities = {0: (7, 5), 1: (9, 0)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    chosen = [
        choose_kernels("auto", num_threads=1, device=torch.device("cuda", index)).name
        for index in capabilities
    ]
    assert chosen == ["torch", "triton"]


def test_without_triton_cuda_gets_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_triton(name: str) -> ModuleType:
        if name == "triton":
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(kernel_choice, "import_module", no_triton)
    choice = choose_kernels("auto", num_threads=1, device=CUDA)
    assert (choice.name, choice.reason) == ("torch", "triton isn't installed")


def test_numba_is_refused_on_cuda_and_triton_on_a_cpu() -> None:
    with pytest.raises(InvalidModel, match="on CPUs only"):
        choose_kernels("numba", num_threads=1, device=CUDA)
    with pytest.raises(InvalidModel, match="only its interpreter"):
        choose_kernels("triton", num_threads=1)
