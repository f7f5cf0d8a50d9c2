"""Each pillar of the engine, on and off: what it saves, and what it costs.

Every function returns one JSON-ready object with the figures of both sides. Sizes are in `Scale`,
so that the same code runs as a minute's rehearsal and as the measurement.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from random_adapters import write_adapter
from stepping import Stepper, Stream, random_prompt
from transformers import AutoConfig

from engine.kvcache.block_pool import BlockPool
from engine.kvcache.cache_manager import CacheManager
from engine.kvcache.prefix_index import PrefixIndex
from engine.llm import LLM

OpenLLM = Callable[..., LLM]
LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. num_repeats are interleaved: on, off, on, off."""

    num_repeats: int
    num_requests: int
    num_seqs: int
    max_answer_tokens: int
    prefix_tokens: int
    intruder_tokens: int
    num_pairs: int
    num_decode_tokens: int


FULL = Scale(
    num_repeats=5,
    num_requests=48,
    num_seqs=8,
    max_answer_tokens=128,
    prefix_tokens=1024,
    intruder_tokens=2048,
    num_pairs=15,
    num_decode_tokens=48,
)
REHEARSAL = Scale(
    num_repeats=1,
    num_requests=12,
    num_seqs=4,
    max_answer_tokens=32,
    prefix_tokens=256,
    intruder_tokens=512,
    num_pairs=3,
    num_decode_tokens=12,
)


def kv_memory(open_llm: OpenLLM, scale: Scale) -> dict[str, Any]:
    """Bytes of KV held while answering, against a whole context reserved for each sequence."""
    generator = random.Random(1)
    looks: list[KVLook] = []
    with open_llm(max_num_seqs=scale.num_seqs) as llm:
        stepper = Stepper(llm)
        for prompt_ids, max_tokens in _mixed_requests(generator, scale):
            stepper.add(prompt_ids, max_tokens=max_tokens)
        pool, num_running = llm.core.scheduler.cache.pool, lambda: llm.core.scheduler.num_running

        def look() -> None:
            if num_running():
                looks.append(
                    KVLook(
                        num_running=num_running(),
                        num_held_blocks=pool.num_blocks - pool.num_free_blocks,
                        num_tokens=stepper.num_tokens_computed,
                    )
                )

        stepper.run(after_each=look)
        return _kv_figures(llm, looks)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLook:
    """What was held after one step."""

    num_running: int
    num_held_blocks: int
    num_tokens: int


def _kv_figures(llm: LLM, looks: Sequence[KVLook]) -> dict[str, Any]:
    block_bytes, block_size = llm.core.runner.kv.block_bytes, llm.config.block_size
    blocks_per_sequence = -(-llm.core.limits.max_model_len // block_size)
    num_blocks = llm.core.scheduler.cache.pool.num_blocks
    held = [look.num_held_blocks for look in looks]
    reserved = [look.num_running * blocks_per_sequence for look in looks]
    per_sequence = statistics.mean(look.num_held_blocks / look.num_running for look in looks)
    return {
        "max_model_len": llm.core.limits.max_model_len,
        "held_bytes_mean": round(statistics.mean(held) * block_bytes),
        "held_bytes_peak": max(held) * block_bytes,
        "reserved_bytes_mean": round(statistics.mean(reserved) * block_bytes),
        "reserved_bytes_peak": max(reserved) * block_bytes,
        "held_slots_filled": round(
            sum(look.num_tokens for look in looks) / (sum(held) * block_size), 3
        ),
        "kv_bytes": num_blocks * block_bytes,
        "sequences_that_fit": {
            "paged": int(num_blocks / per_sequence),
            "reserved": num_blocks // blocks_per_sequence,
        },
    }


def continuous_batching(open_llm: OpenLLM, scale: Scale) -> dict[str, Any]:
    """The same requests: each starts when a place is free, or batches wait for their slowest."""
    sides: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    with open_llm(max_num_seqs=scale.num_seqs) as llm:
        stepper = Stepper(llm)
        stepper.add(random_prompt(random.Random(0), 16), max_tokens=4)
        stepper.run()
        for repeat in range(scale.num_repeats):
            for side, batch_size in (("on", scale.num_requests), ("off", scale.num_seqs)):
                # Other tokens each time, so that nothing is found in the prefix cache.
                generator = random.Random(f"{repeat} {side}")
                lengths = random.Random(repeat)
                requests = [
                    (random_prompt(generator, 64), lengths.randint(8, scale.max_answer_tokens))
                    for _ in range(scale.num_requests)
                ]
                sides[side].append(_answer_in_batches(stepper, requests, batch_size=batch_size))
    return {"batch": scale.num_seqs, **{side: _medians(runs) for side, runs in sides.items()}}


def prefix_cache(open_llm: OpenLLM, scale: Scale) -> dict[str, Any]:
    """TTFT with a prefix that others have computed, and what looking for one costs."""
    generator = random.Random(2)
    prefix = random_prompt(generator, scale.prefix_tokens)
    ttfts_s: dict[str, list[float]] = {
        name: [] for name in ("shared on", "shared off", "unshared on", "unshared off")
    }
    cached: dict[str, set[int]] = {name: set() for name in ttfts_s}
    with open_llm(max_num_seqs=scale.num_seqs) as on, open_llm(max_num_seqs=scale.num_seqs) as off:
        switch_prefix_cache_off(off)
        steppers = {"on": Stepper(on), "off": Stepper(off)}
        for stepper in steppers.values():
            stepper.add(prefix, max_tokens=1)
            stepper.run()
        for _ in range(2 * scale.num_repeats):
            own = random_prompt(generator, 32)
            for kind in ("shared", "unshared"):
                first = prefix if kind == "shared" else random_prompt(generator, len(prefix))
                for side, stepper in steppers.items():
                    stream = stepper.add(first + own, max_tokens=1)
                    stepper.run()
                    ttfts_s[f"{kind} {side}"].append(stream.ttft_s)
                    cached[f"{kind} {side}"].add(stream.num_cached_tokens)
    pairs = zip(ttfts_s["unshared on"], ttfts_s["unshared off"], strict=True)
    return {
        "prefix_tokens": scale.prefix_tokens,
        "ttft_s": {name: round(statistics.median(values), 4) for name, values in ttfts_s.items()},
        "cached_tokens": {name: sorted(values) for name, values in cached.items()},
        "unshared_cost": round(statistics.median(on / off for on, off in pairs) - 1, 4),
    }


def chunked_prefill(open_llm: OpenLLM, scale: Scale) -> dict[str, Any]:
    """Time between tokens of others while a long prompt comes in, by the step's token budget."""
    budgets = {"whole prompt in a step": 2 * scale.intruder_tokens, "512": 512, "128": 128}
    figures: dict[str, dict[str, float]] = {}
    for name, budget in budgets.items():
        with open_llm(max_num_seqs=scale.num_seqs + 1, max_tokens_per_step=budget) as llm:
            runs = [
                _intrude(Stepper(llm), scale, generator=random.Random(repeat))
                for repeat in range(scale.num_repeats)
            ]
        figures[name] = _medians(runs)
    return {"bystanders": scale.num_seqs, "prompt_tokens": scale.intruder_tokens, **figures}


def idle_lora(open_llm: OpenLLM, scale: Scale, *, scratch: Path) -> dict[str, Any]:
    """Steps of base traffic with LoRA enabled and an adapter resident, against LoRA off."""
    ratios, steps_ms = [], {"on": [], "off": []}
    with ExitStack() as opened:
        llms = {
            side: opened.enter_context(open_llm(max_num_seqs=scale.num_seqs, enable_lora=enabled))
            for side, enabled in (("on", True), ("off", False))
        }
        _make_resident(llms["on"], scratch)
        steppers = {side: Stepper(llm) for side, llm in llms.items()}
        for pair in range(scale.num_pairs):
            step_s = _decode_steps_s(steppers, scale, seed=pair)
            ratios.append(step_s["on"] / step_s["off"])
            for side, seconds in step_s.items():
                steps_ms[side].append(1000 * seconds)
    return {
        "batch": scale.num_seqs,
        "step_ms": {side: round(statistics.median(times), 2) for side, times in steps_ms.items()},
        "cost": round(statistics.median(ratios) - 1, 4),
        "cost_quartiles": [round(q - 1, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
    }


def switch_prefix_cache_off(llm: LLM) -> None:
    """Give the scheduler a cache whose index digests nothing and so never finds anything."""
    scheduler = llm.core.scheduler
    assert not scheduler.has_work, "its blocks would be lost"
    scheduler.cache = CacheManager(
        BlockPool(scheduler.cache.pool.num_blocks),
        scheduler.cache.block_size,
        index=_NoIndex(),
    )


class _NoIndex(PrefixIndex):
    """Finds nothing and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(digest_of=lambda _parent, _token_ids: b"")

    def find(self, digest: bytes, *, parent: bytes, token_ids: Sequence[int]) -> int | None:
        return None

    def publish(
        self, block_id: int, digest: bytes, *, parent: bytes, token_ids: Sequence[int]
    ) -> None:
        pass


def _mixed_requests(generator: random.Random, scale: Scale) -> list[tuple[list[int], int]]:
    return [
        (
            random_prompt(generator, generator.randint(16, 256)),
            generator.randint(8, scale.max_answer_tokens),
        )
        for _ in range(scale.num_requests)
    ]


def _answer_in_batches(
    stepper: Stepper, requests: Sequence[tuple[list[int], int]], *, batch_size: int
) -> dict[str, float]:
    """Answer all, `batch_size` of them at a time; the next batch waits for the last of one."""
    streams: list[Stream] = []
    wall_s = 0.0
    for start in range(0, len(requests), batch_size):
        streams += [
            stepper.add(prompt_ids, max_tokens=max_tokens)
            for prompt_ids, max_tokens in requests[start : start + batch_size]
        ]
        wall_s += stepper.run()
    num_tokens = sum(len(stream.token_times_s) for stream in streams)
    return {"wall_s": wall_s, "output_tokens_per_s": num_tokens / wall_s}


def _intrude(stepper: Stepper, scale: Scale, *, generator: random.Random) -> dict[str, float]:
    """Let a long prompt in while others decode; return their gaps before and meanwhile."""
    max_tokens = stepper.llm.core.limits.max_model_len // 2  # until they are aborted
    bystanders = [
        stepper.add(random_prompt(generator, 32), max_tokens=max_tokens)
        for _ in range(scale.num_seqs)
    ]
    while len(bystanders[-1].token_times_s) < scale.num_decode_tokens:
        stepper.step()
    calm_gaps_s = [gap for stream in bystanders for gap in stream.gaps_s[1:]]
    num_before = [len(stream.token_times_s) for stream in bystanders]
    intruder = stepper.add(random_prompt(generator, scale.intruder_tokens), max_tokens=1)
    while not intruder.is_over:
        stepper.step()
    gaps_s = [
        gap
        for stream, num in zip(bystanders, num_before, strict=True)
        for gap in stream.gaps_s[num - 1 :]
    ]
    stepper.abort_all()
    return {
        "calm_gap_ms": 1000 * statistics.median(calm_gaps_s),
        "gap_median_ms": 1000 * statistics.median(gaps_s),
        "gap_max_ms": 1000 * max(gaps_s),
        "ttft_s": intruder.ttft_s,
    }


def _make_resident(llm: LLM, scratch: Path) -> None:
    """Load one adapter and let it answer once; it stays in the arena, unused from then on."""
    config = AutoConfig.from_pretrained(llm.loaded.model_dir)
    write_adapter(scratch / "idle", config, lora_rank=LORA_RANK, seed=0)
    llm.load_adapter("idle@000000000000", scratch / "idle")
    stepper = Stepper(llm)
    stepper.add(random_prompt(random.Random(0), 8), max_tokens=2, lora_id="idle@000000000000")
    stepper.run()
    assert llm.status().num_adapter_loads == 1


def _decode_steps_s(steppers: dict[str, Stepper], scale: Scale, *, seed: int) -> dict[str, float]:
    """Median seconds of a step in which every sequence computes one token, by side.

    The sides take turns step by step, so that whatever else the machine does meets both alike.
    """
    times_s: dict[str, list[float]] = {side: [] for side in steppers}
    for stepper in steppers.values():
        generator = random.Random(seed)
        streams = [
            stepper.add(random_prompt(generator, 32), max_tokens=scale.num_decode_tokens)
            for _ in range(scale.num_seqs)
        ]
        while not all(stream.token_times_s for stream in streams):
            stepper.step()
    sides = list(steppers)
    while all(stepper.num_open == scale.num_seqs for stepper in steppers.values()):
        for side in sides:
            times_s[side].append(steppers[side].step())
        sides.reverse()
    for stepper in steppers.values():
        stepper.run()
    return {side: statistics.median(times) for side, times in times_s.items()}


def _medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
