"""The budget becomes KV blocks and rank rows; what lies outside the layers gets a small share."""

import pytest
import torch

from engine.device_share import DeviceShare
from engine.model.memory import (
    GIB,
    MemorySplit,
    cuda_budget_bytes,
    host_budget_bytes,
    peak_meter,
    split_memory,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

ROW_BYTES = {"attention": 300, "mlp": 700, "embedding": 50, "head": 50}


def split(row_bytes: dict[str, int]) -> MemorySplit:
    return split_memory(
        budget_bytes=1_000_000,
        weight_bytes=0,
        activation_bytes=200_000,
        block_bytes=1_000,
        row_bytes=row_bytes,
        max_blocks=10_000,
        min_blocks=10,
    )


def test_groups_outside_the_layers_get_a_sixteenth_each() -> None:
    rows = split(ROW_BYTES).lora_rows

    assert rows["embedding"] == rows["head"] == 200_000 // 16 // 50
    assert rows["attention"] == rows["mlp"] == 200_000 * 14 // 16 // 1000


def test_the_shares_stay_inside_the_budget() -> None:
    whole = split(ROW_BYTES)

    assert whole.kv_bytes + whole.lora_bytes + whole.activation_bytes <= whole.budget_bytes
    assert whole.lora_bytes >= 195_000


def test_without_adapters_all_goes_to_blocks() -> None:
    assert split({}).lora_rows == {}
    assert split({}).num_blocks == 800


def test_on_cuda_the_budget_is_a_share_of_what_the_workers_device_has_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_bytes = {0: 24 * GIB, 1: 10 * GIB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (free_bytes[device.index], 80 * GIB)
    )
    first, second = (DeviceShare.of(n, num_workers=3, num_devices=2) for n in (0, 1))

    assert cuda_budget_bytes(CUDA, first, weight_bytes=4 * GIB) == 9 * GIB
    assert cuda_budget_bytes(torch.device("cuda", 1), second, weight_bytes=4 * GIB) == 9 * GIB


def test_on_a_cpu_cuda_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("asked"))

    assert 0 < host_budget_bytes() <= 4 * GIB
    assert peak_meter(CPU).rise_bytes() >= 0


def test_on_cuda_the_peak_is_what_the_allocator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)

    assert peak_meter(CUDA).rise_bytes() == 700
