"""Weights cut into numbered files: `adapter_model-00001-of-00003.safetensors` and so on."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from adapters.peft_format import WEIGHTS_NAME

MAX_SHARDS = 256
_SHARD = re.compile(r"adapter_model-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The shards among some names, in order, and what is missing of them."""

    names: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def find_shards(names: Iterable[str]) -> Shards:
    """Find the shards of one adapter among the plain file names of one folder."""
    matches = [match for match in map(_SHARD.fullmatch, sorted(set(names))) if match is not None]
    found = tuple(match[0] for match in matches)
    totals = {int(match["total"]) for match in matches}
    if len(totals) > 1:
        return Shards(
            names=found,
            problems=(f"{found[0]} and {found[-1]} are shards of different sets of weights",),
        )
    total = next(iter(totals), 0)
    if total > MAX_SHARDS:
        return Shards(
            names=found,
            problems=(f"the weights are cut into {total} shards; at most {MAX_SHARDS} are read",),
        )
    missing = set(range(1, total + 1)) - {int(match["number"]) for match in matches}
    extra = {int(match["number"]) for match in matches} - set(range(1, total + 1))
    if missing or extra:
        return Shards(
            names=found,
            problems=(
                f"the weights are cut into {total} shards, and {len(missing)} of them are missing "
                f"(number {min(missing | extra)} first): upload all, or save the adapter into the "
                f"one file {WEIGHTS_NAME}",
            ),
        )
    return Shards(names=found)
