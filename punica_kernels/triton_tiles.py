"""Which tile sizes each kernel runs with, by shape and device family: the one table to tune."""

from dataclasses import dataclass
from enum import StrEnum

import torch

MAX_CONTEXT_SPLITS = 16
MIN_SPLIT_TOKENS = 256  # less context than this isn't worth a program of its own
MIN_SPLIT_FEATURES = 1024  # likewise for input columns of a shrink
PROGRAMS_WANTED = 256  # about two for each multiprocessor of a large device


class Family(StrEnum):
    """Devices that share tile sizes, named after the oldest of them."""

    SM_80 = "sm_80"
    SM_90 = "sm_90"
    SM_100 = "sm_100"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTiles:
    """Tiles of shrink and expand over segments.

    block_m   token rows of one tile of the plan
    block_r   rank rows: the shrink's output columns, the expand's inner steps
    block_k   input columns in one step of the shrink's loop
    block_n   output columns of one program of the expand
    """

    block_m: int
    block_r: int
    block_k: int
    block_n: int
    max_splits: int
    shrink_warps: int
    expand_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiles:
    """Tiles of BGMV: one token row, so no dot; letters as in LoraTiles."""

    block_r: int
    block_k: int
    block_n: int
    max_splits: int
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """Tiles of paged attention.

    block_m   rows: query tokens times the query heads of one KV head
    block_n   KV positions in one step of the loop
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Segments of a decode are short: small row tiles, many splits of K. A prefill has rows enough.
_SHORT = LoraTiles(
    block_m=16,
    block_r=16,
    block_k=128,
    block_n=128,
    max_splits=8,
    shrink_warps=4,
    expand_warps=4,
    num_stages=3,
)
_LONG = LoraTiles(
    block_m=64,
    block_r=32,
    block_k=64,
    block_n=128,
    max_splits=2,
    shrink_warps=4,
    expand_warps=8,
    num_stages=3,
)
_ROW = RowTiles(block_r=16, block_k=256, block_n=256, max_splits=8, num_warps=4)
_DECODE = AttentionTiles(block_m=16, block_n=64, num_warps=4, num_stages=2)
_PREFILL = AttentionTiles(block_m=64, block_n=64, num_warps=4, num_stages=2)
_PREFILL_SM_80 = AttentionTiles(block_m=64, block_n=64, num_warps=8, num_stages=2)

# Exact products of fp32 don't run on tensor cores and want registers.
_DECODE_FP32 = AttentionTiles(block_m=16, block_n=16, num_warps=4, num_stages=1)
_PREFILL_FP32 = AttentionTiles(block_m=32, block_n=16, num_warps=8, num_stages=1)

SHORT_LORA = dict.fromkeys(Family, _SHORT)
LONG_LORA = dict.fromkeys(Family, _LONG)
ROW_LORA = dict.fromkeys(Family, _ROW)
DECODE_ATTENTION = dict.fromkeys(Family, _DECODE)
PREFILL_ATTENTION = dict.fromkeys(Family, _PREFILL) | {Family.SM_80: _PREFILL_SM_80}


def family_of(device: torch.device) -> Family:
    """Return the family of a device; the interpreter's CPU counts as the middle one."""
    if device.type != "cuda":
        return Family.SM_90
    major, _ = torch.cuda.get_device_capability(device)
    if major >= 10:
        return Family.SM_100
    return Family.SM_90 if major == 9 else Family.SM_80


def lora_tiles(family: Family, *, longest_segment: int) -> LoraTiles:
    """Return the tiles for a plan whose longest segment has so many rows."""
    short = SHORT_LORA[family]
    return short if longest_segment <= short.block_m else LONG_LORA[family]


def decode_tiles(family: Family, dtype: torch.dtype) -> AttentionTiles:
    """Return the tiles for chunks of one token."""
    return _DECODE_FP32 if dtype is torch.float32 else DECODE_ATTENTION[family]


def prefill_tiles(family: Family, dtype: torch.dtype) -> AttentionTiles:
    """Return the tiles for longer chunks."""
    return _PREFILL_FP32 if dtype is torch.float32 else PREFILL_ATTENTION[family]


def num_feature_splits(in_features: int, max_splits: int) -> int:
    """Return into how many parts a shrink cuts K.

    By the shape alone and never by the batch, so that a row's sum has one order.
    """
    return min(max_splits, -(-in_features // MIN_SPLIT_FEATURES))


def num_context_splits(*, num_programs: int, longest_context: int) -> int:
    """Return into how many parts the contexts of a launch are cut: 1 if it fills the device."""
    wanted = -(-PROGRAMS_WANTED // max(num_programs, 1))
    most = max(longest_context // MIN_SPLIT_TOKENS, 1)
    return next_power_of_2(min(wanted, most, MAX_CONTEXT_SPLITS))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that isn't smaller."""
    return 1 << max(number - 1, 0).bit_length()
