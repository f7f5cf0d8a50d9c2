"""Which CUDA device a worker opens, on a machine that has some."""

import pytest
import torch

from engine.device_share import DeviceShare
from engine.model.device import device_share, open_device


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two devices; what was made the current one is noted."""
    made_current: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    return made_current


def test_a_worker_alone_takes_the_first(current: list[int]) -> None:
    assert open_device("cuda") == torch.device("cuda", 0)
    assert current == [0]


def test_the_second_of_three_workers_takes_the_second_and_has_it_alone(current: list[int]) -> None:
    assert open_device("cuda", worker_index=1, num_workers=3) == torch.device("cuda", 1)
    assert current == [1]
    assert device_share(1, num_workers=3) == DeviceShare(index=1, num_later=0)
    assert device_share(0, num_workers=3) == DeviceShare(index=0, num_later=1)


def test_a_cpu_is_the_same_for_all(current: list[int]) -> None:
    assert open_device("cpu", worker_index=1, num_workers=3) == torch.device("cpu")
    assert current == []
