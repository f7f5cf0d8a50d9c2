"""What compare.py asks for: which adapters, which prompts, how many requests."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from peers.peer import ADAPTER_PREFIX, PEERS_DIR, Adapter
from tokenizers import Tokenizer

TEXT = (
    "The harbour was quiet that morning, and the fishermen had already mended their nets. "
    "A letter lay on the table; nobody had opened it since the ship went out in the spring. "
    "Rain began to fall on the roofs, first slowly, then all at once, as it does in the north."
)
SUFFIX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is asked for.

    num_cold        adapters that arrive while others are answered
    num_pairs       through the gateway and past it, taken in turns
    """

    concurrencies: tuple[int, ...]
    prompt_tokens: int = 128
    output_tokens: int = 64
    prefix_tokens: int = 1024
    num_cold: int = 8
    num_pairs: int = 3
    pause_s: float = 5.0

    @property
    def max_concurrency(self) -> int:
        return max(self.concurrencies)

    def num_requests(self, concurrency: int) -> int:
        """Two for each place in flight, and no fewer than four."""
        return max(4, 2 * concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Workloads that one start of a system serves, since they need the same adapters and room.

    lora_ranks   of the adapters, in turns
    """

    name: str
    workloads: tuple[str, ...]
    num_adapters: int
    lora_ranks: tuple[int, ...]
    num_kv_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and the adapter that answers it; None is the base."""

    prompt_ids: list[int]
    adapter: Adapter | None


def groups(scale: Scale) -> tuple[Group, ...]:
    """The starts of a system: short prompts, adapters of many ranks, long prefixes."""
    most = scale.max_concurrency
    short = _rounded(scale.prompt_tokens + scale.output_tokens)
    long = _rounded(scale.prefix_tokens + SUFFIX_TOKENS + scale.output_tokens)
    return (
        Group(
            name="short",
            workloads=("base", "gateway", "one adapter", "all distinct", "cold adapters"),
            num_adapters=most,
            lora_ranks=(16,),
            num_kv_tokens=most * short,
            max_model_len=short,
        ),
        Group(
            name="ranks",
            workloads=("zipf",),
            num_adapters=2 * most,
            lora_ranks=(8, 16, 32, 64),
            num_kv_tokens=most * short,
            max_model_len=short,
        ),
        Group(
            name="prefix",
            workloads=("prefix", "prefix, one adapter"),
            num_adapters=1,
            lora_ranks=(16,),
            num_kv_tokens=most * long,
            max_model_len=long,
        ),
    )


def write_adapters(
    count: int, *, lora_ranks: tuple[int, ...], model_dir: Path, first_seed: int = 0
) -> tuple[Adapter, ...]:
    """Adapters with random weights, all linear modules; each written once and kept."""
    from random_adapters import write_adapter  # only here, so that the rest needs no torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    adapters = []
    for number in range(count):
        lora_rank, seed = lora_ranks[number % len(lora_ranks)], first_seed + number
        name = f"{ADAPTER_PREFIX}r{lora_rank}-{seed}"
        folder = PEERS_DIR / "adapters" / name
        if not (folder / "adapter_config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            write_adapter(folder, config, lora_rank=lora_rank, seed=seed)
        adapters.append(Adapter(name=name, folder=folder, lora_rank=lora_rank))
    return tuple(adapters)


class Prompts:
    """Token ids of one text in ever new orders; no two prompts are alike within a seed."""

    def __init__(self, model_dir: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._ids = tokenizer.encode(TEXT, add_special_tokens=False).ids

    def take(self, count: int, *, num_tokens: int, seed: str) -> list[list[int]]:
        """`count` prompts; another seed gives others."""
        chance = random.Random(seed)
        repeated = self._ids * (1 + num_tokens // len(self._ids))
        return [chance.sample(repeated, num_tokens) for _ in range(count)]


def requests(
    workload: str,
    *,
    concurrency: int,
    adapters: tuple[Adapter, ...],
    prompts: Prompts,
    scale: Scale,
    seed: str,
) -> list[Request]:
    """The requests of one level; prompts are new in each, so that no cache knows them."""
    count = scale.num_requests(concurrency)
    seed = f"{seed} {workload} {concurrency}"
    ids = prompts.take(count, num_tokens=scale.prompt_tokens, seed=seed)
    chosen = choose_adapters(workload, count, adapters=adapters, seed=seed)
    return [Request(prompt_ids=one, adapter=two) for one, two in zip(ids, chosen, strict=True)]


def choose_adapters(
    workload: str, count: int, *, adapters: tuple[Adapter, ...], seed: str
) -> list[Adapter | None]:
    """Which adapter each request of a workload asks for."""
    match workload:
        case "base" | "gateway" | "prefix":
            return [None] * count
        case "one adapter" | "prefix, one adapter":
            return [adapters[0]] * count
        case "all distinct":
            return [adapters[number % len(adapters)] for number in range(count)]
        case "zipf":
            weights = [1 / place for place in range(1, len(adapters) + 1)]
            return list(random.Random(seed).choices(adapters, weights, k=count))
    raise ValueError(f"{workload} is no workload of requests")


def prefix_requests(
    workload: str,
    *,
    adapters: tuple[Adapter, ...],
    prompts: Prompts,
    scale: Scale,
    seed: str,
) -> dict[str, list[Request]]:
    """Three levels: each request with its own prefix, all with a new one, all with that again."""
    count = scale.max_concurrency
    chosen = choose_adapters(workload, count, adapters=adapters, seed=seed)
    own = prompts.take(count, num_tokens=scale.prefix_tokens, seed=f"{seed} {workload} own")
    (shared,) = prompts.take(1, num_tokens=scale.prefix_tokens, seed=f"{seed} {workload} shared")
    prefixes = {"own": own, "new": [shared] * count, "again": [shared] * count}
    levels = {}
    for kind, heads in prefixes.items():
        seed_of_tails = f"{seed} {workload} {kind} tails"
        tails = prompts.take(count, num_tokens=SUFFIX_TOKENS, seed=seed_of_tails)
        levels[f"{workload}: {kind}"] = [
            Request(prompt_ids=[*head, *tail], adapter=adapter)
            for head, tail, adapter in zip(heads, tails, chosen, strict=True)
        ]
    return levels


def _rounded(num_tokens: int) -> int:
    """Up to whole KV blocks of any system."""
    return 128 * (1 + num_tokens // 128)
