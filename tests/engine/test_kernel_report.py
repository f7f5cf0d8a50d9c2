"""What the engine says of the devices that are here, and what it asks of CUDA for that."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from engine import kernel_report
from engine.model import attention_choice, kernel_choice

GIB = 1 << 30
NAMES = ("New Device", "Old Device")
CAPABILITIES = ((9, 0), (7, 5))
MEMORY = ((130 * GIB, 140 * GIB), (int(1.5 * GIB), 16 * GIB))  # free, in all
TRITON = SimpleNamespace(__version__="1.2.3")

Report = Callable[[], dict[str, object]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Return what writes the report and reads it back."""

    def report() -> dict[str, object]:
        kernel_report.main()
        line: dict[str, object] = json.loads(capsys.readouterr().out)
        return line

    return report


def find_triton(monkeypatch: pytest.MonkeyPatch, *, found: bool) -> None:
    """Have Triton found, or not, where the report and the choice import it."""

    def triton(name: str) -> object:
        if name == "triton" and found:
            return TRITON
        raise ImportError(name)

    monkeypatch.setattr(kernel_report, "import_module", triton)
    monkeypatch.setattr(kernel_choice, "import_module", triton)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch find two CUDA devices that answer only while they are the current one."""
    current: list[int] = []

    @contextmanager
    def made_current(index: int) -> Iterator[None]:
        current.append(index)
        try:
            yield
        finally:
            current.pop()

    def answer(values: tuple[object, ...]) -> Callable[[torch.device], object]:
        def of(device: torch.device) -> object:
            assert [device.index] == current
            return values[device.index]

        return of

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(NAMES))
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "get_device_name", answer(NAMES))
    monkeypatch.setattr(torch.cuda, "get_device_capability", answer(CAPABILITIES))
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer(MEMORY))
    monkeypatch.setattr(attention_choice, "find_spec", lambda _name: None)
    find_triton(monkeypatch, found=True)


def test_without_cuda_nothing_is_asked_of_it_but_whether_it_is_here(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    def refuse(name: str) -> Callable[..., None]:
        return lambda *_args, **_more: pytest.fail(f"torch.cuda.{name} was called")

    for name, value in list(vars(torch.cuda).items()):
        if callable(value):
            monkeypatch.setattr(torch.cuda, name, refuse(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert report().keys() == {"kernels", "reason", "openmp"}


def test_each_device_is_described_with_what_would_run_there(
    two_devices: None, report: Report
) -> None:
    assert report()["devices"] == [
        {
            "name": "cuda:0",
            "kernels": "triton",
            "text": "New Device, compute capability 9.0, 130.0 of 140.0 GiB free, Triton 1.2.3; "
            "kernels: triton (Triton can run here; attention is its own: FlashInfer isn't "
            "installed)",
        },
        {
            "name": "cuda:1",
            "kernels": "torch",
            "text": "Old Device, compute capability 7.5, 1.5 of 16.0 GiB free, Triton 1.2.3; "
            "kernels: torch (Triton's kernels want compute capability 8.0 or later; this device "
            "has 7.5)",
        },
    ]


def texts_of(line: dict[str, object]) -> list[str]:
    devices = line["devices"]
    assert isinstance(devices, list)
    return [device["text"] for device in devices]


def test_flashinfer_is_named_where_it_would_attend(
    two_devices: None, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "find_spec", lambda name: name)

    new, old = texts_of(report())

    assert "FlashInfer is installed and attends if it fits the model" in new
    assert "FlashInfer" not in old


def test_a_triton_that_can_not_be_imported_is_said(
    two_devices: None, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_triton(monkeypatch, found=False)

    for text in texts_of(report()):
        assert text.endswith("Triton can't be imported; kernels: torch (triton isn't installed)")


def test_a_device_that_fails_is_said_and_the_others_are_described(
    two_devices: None, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def memory(device: torch.device) -> tuple[int, int]:
        if device.index == 0:
            raise RuntimeError("CUDA error: device is busy\nand much more")
        return MEMORY[device.index]

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)

    line = report()

    assert line["kernels"], "the CPU's are named all the same"
    first, second = texts_of(line)
    assert first == "it can't be used (RuntimeError: CUDA error: device is busy)"
    assert second.startswith("Old Device")
