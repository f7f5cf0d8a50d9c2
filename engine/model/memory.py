"""How the memory budget becomes KV blocks and arena rows; measured, not guessed."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.device_share import DeviceShare
from engine.errors import InvalidModel

GIB = 1024**3
MIB = 1024**2
LORA_SHARE = 0.25
# Adapters rarely reach outside the layers, and a row there is as wide as the vocabulary.
OUTSIDE_GROUPS = ("embedding", "head")
OUTSIDE_SHARE = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """What the budget is spent on; all in bytes but the two counts.

    budget_bytes = activation_bytes + kv_bytes + lora_bytes, up to one block and one row.
    """

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    lora_bytes: int
    num_blocks: int
    lora_rows: dict[str, int]

    def as_numbers(self) -> dict[str, int]:
        """Return the byte counts by name, for a person and for metrics."""
        return {
            "budget_bytes": self.budget_bytes,
            "weight_bytes": self.weight_bytes,
            "activation_bytes": self.activation_bytes,
            "kv_bytes": self.kv_bytes,
            "lora_bytes": self.lora_bytes,
        }


def host_budget_bytes() -> int:
    """Return min(4 GiB, half of the memory that is available now)."""
    return min(4 * GIB, _available_bytes() // 2)


def cuda_budget_bytes(device: torch.device, share: DeviceShare, *, weight_bytes: int) -> int:
    """Return a worker's share of what is free on `device`, on which its weights are already."""
    torch.cuda.empty_cache()  # what torch's allocator keeps for itself is free, too
    num_free_bytes, _ = torch.cuda.mem_get_info(device)
    return share.budget_bytes(num_free_bytes=num_free_bytes, weight_bytes=weight_bytes)


def split_memory(
    *,
    budget_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    block_bytes: int,
    row_bytes: Mapping[str, int],
    max_blocks: int,
    min_blocks: int,
) -> MemorySplit:
    """Divide the budget: activations first, a quarter of the rest to rank rows, the rest to KV.

    `row_bytes` gives one rank row's bytes in each arena group, over all layers; empty without
    LoRA. `max_blocks` is what all sequences at full length could use; what KV leaves over goes
    to rank rows, of whose bytes the embedding and the head get a sixteenth each. Raises
    InvalidModel with the numbers if one sequence of full length can't fit.
    """
    rest = budget_bytes - activation_bytes
    lora_share = int(rest * LORA_SHARE) if row_bytes else 0
    num_blocks = min((rest - lora_share) // block_bytes, max_blocks)
    if num_blocks < min_blocks:
        needed = activation_bytes + int(min_blocks * block_bytes / (1 - LORA_SHARE))
        raise InvalidModel(
            f"a memory budget of {budget_bytes // MIB} MiB holds {max(num_blocks, 0)} KV blocks, "
            f"but one sequence of full length needs {min_blocks} (about {needed // MIB + 1} MiB); "
            "raise --memory or lower --max-model-len"
        )
    kv_bytes = num_blocks * block_bytes
    lora_rows = _lora_rows(max(rest - kv_bytes, 0), row_bytes)
    return MemorySplit(
        budget_bytes=budget_bytes,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=kv_bytes,
        lora_bytes=sum(lora_rows[group] * row_bytes[group] for group in lora_rows),
        num_blocks=int(num_blocks),
        lora_rows=lora_rows,
    )


def _lora_rows(num_bytes: int, row_bytes: Mapping[str, int]) -> dict[str, int]:
    """Give each group outside the layers its small share, and those inside equally many rows."""
    outside = {
        group: int(num_bytes * OUTSIDE_SHARE) // row_bytes[group]
        for group in OUTSIDE_GROUPS
        if group in row_bytes
    }
    inside = {group: size for group, size in row_bytes.items() if group not in outside}
    rest = num_bytes - sum(num_rows * row_bytes[group] for group, num_rows in outside.items())
    num_rows = rest // sum(inside.values()) if inside else 0
    return dict.fromkeys(inside, num_rows) | outside


class PeakMeter(Protocol):
    """Measures how far memory rises above where it was when the meter was made."""

    def rise_bytes(self) -> int:
        """Return peak minus start, in bytes; 0 where it can't be measured."""


def peak_meter(device: torch.device) -> PeakMeter:
    """Return a meter for what runs on `device`, started."""
    return CudaPeakMeter(device) if device.type == "cuda" else ProcessPeakMeter()


class CudaPeakMeter:
    """Measures what torch's allocator has handed out on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._start_bytes = torch.cuda.memory_allocated(device)

    def rise_bytes(self) -> int:
        """Return peak minus start, in bytes."""
        return torch.cuda.max_memory_allocated(self._device) - self._start_bytes


class ProcessPeakMeter:
    """Measures how far this process's resident memory rises above where it started.

    Linux only; elsewhere `rise_bytes` is 0 and the caller's own estimate has to do.
    """

    def __init__(self) -> None:
        self._status = Path("/proc/self/status")
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
            self._start_bytes = self._field("VmRSS")
        except OSError:
            self._start_bytes = None

    def rise_bytes(self) -> int:
        """Return peak minus start, in bytes; 0 where it can't be measured."""
        if self._start_bytes is None:
            return 0
        peak = self._field("VmHWM")
        return 0 if peak is None else max(peak - self._start_bytes, 0)

    def _field(self, name: str) -> int | None:
        for line in self._status.read_text(encoding="ascii").splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        return None


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
