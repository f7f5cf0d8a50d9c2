"""One start of one system: its workloads one after the other, and what they took."""

import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from compare_workloads import Group, Prompts, Request, Scale, prefix_requests, requests
from harness import Call, Timing, run_level, stream_completion
from peers.loraplex import Loraplex
from peers.peer import Adapter, BatchPeer, Setup
from peers.server import ServerPeer
from processes import MemoryWatch, OthersWatch

WARM_TOKENS = 4
BYSTANDERS = 4
SLOW_SAMPLES_S = 2.0


def measure_server(
    server: ServerPeer,
    group: Group,
    *,
    workloads: tuple[str, ...],
    prompts: Prompts,
    scale: Scale,
    cold: tuple[Adapter, ...],
    seed: str,
) -> dict[str, Any]:
    """Run the workloads on a server that has started; returns what it and they took."""
    adapters = server.setup.adapters
    _warm_up(server, prompts, scale, seed)
    server.memory.every_s = SLOW_SAMPLES_S
    levels: list[dict[str, Any]] = []
    for workload in workloads:
        if workload == "gateway":
            levels += _gateway(server, prompts, scale, seed)
        elif workload.startswith("prefix"):
            made = prefix_requests(
                workload, adapters=adapters, prompts=prompts, scale=scale, seed=seed
            )
            size = scale.max_concurrency
            levels += [_level(server, name, one, size, scale) for name, one in made.items()]
        elif workload != "cold adapters":
            for size in scale.concurrencies:
                one = requests(
                    workload,
                    concurrency=size,
                    adapters=adapters,
                    prompts=prompts,
                    scale=scale,
                    seed=seed,
                )
                levels.append(_level(server, workload, one, size, scale))
    result = {
        "flags": server.flags(),
        "start_s": server.start_s,
        "first_token_s": server.first_token_s,
        "peak_pss_bytes": server.memory.peak_pss_bytes,
        "processes": server.processes(),
        "num_adapters": len(adapters),
        "num_kv_tokens": group.num_kv_tokens,
        "levels": levels,
    }
    if "cold adapters" in workloads:
        result["cold"] = asyncio.run(_cold_adapters(server, cold, prompts, scale, seed))
        _say(server.key, result["cold"])
    return result


def measure_batches(
    peer: type[BatchPeer],
    setup: Setup,
    *,
    workloads: tuple[str, ...],
    prompts: Prompts,
    scale: Scale,
    seed: str,
) -> dict[str, Any]:
    """Give a script the same levels; its process's memory is watched from outside."""
    plan = peer.plan(
        setup,
        list(_planned(workloads, setup, prompts, scale, seed)),
        max_tokens=scale.output_tokens,
    )
    with setup.log.open("w") as log:
        process = subprocess.Popen(
            peer.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    memory = MemoryWatch(process.pid)
    memory.every_s = SLOW_SAMPLES_S
    memory.start()
    try:
        start, *levels = _talk(peer.key, process, plan)
    finally:
        memory.stop()
        process.kill()
    if process.wait() != 0:
        said = setup.log.read_text(errors="replace").strip().splitlines()[-8:]
        raise RuntimeError(f"{peer.title} ended with {process.returncode}: " + "\n".join(said))
    return {
        "flags": " ".join(part.rpartition("/")[2] for part in peer.command()),
        **start,
        "peak_pss_bytes": memory.peak_pss_bytes,
        "num_adapters": len(setup.adapters),
        "levels": levels,
    }


def _planned(
    workloads: tuple[str, ...], setup: Setup, prompts: Prompts, scale: Scale, seed: str
) -> Iterator[dict[str, Any]]:
    for workload in workloads:
        for size in scale.concurrencies:
            wanted = requests(
                workload,
                concurrency=size,
                adapters=setup.adapters,
                prompts=prompts,
                scale=scale,
                seed=seed,
            )
            names = [one.adapter.name for one in wanted if one.adapter is not None]
            yield {
                "workload": workload,
                "concurrency": size,
                "prompts": [one.prompt_ids for one in wanted],
                "adapter_names": names if workload == "all distinct" else None,
            }


def _talk(key: str, process: subprocess.Popen[str], plan: dict[str, Any]) -> list[dict[str, Any]]:
    assert process.stdin is not None
    assert process.stdout is not None
    others = OthersWatch(process.pid)
    with process.stdin as stdin:
        json.dump(plan, stdin)
    lines = []
    for line in process.stdout:
        lines.append(json.loads(line) | {"others_cores": others.num_cores_since_last()})
        _say(key, lines[-1])
    process.wait()
    if not lines:
        return [{}]
    lines[0].pop("others_cores")
    return lines


def _level(
    server: ServerPeer,
    workload: str,
    wanted: list[Request],
    concurrency: int,
    scale: Scale,
    *,
    url: str | None = None,
) -> dict[str, Any]:
    calls = [server.call(one.prompt_ids, one.adapter) for one in wanted]
    others = OthersWatch(server.pid)
    level = asyncio.run(
        run_level(url or server.url, calls, concurrency=concurrency, max_tokens=scale.output_tokens)
    )
    share = {"others_cores": others.num_cores_since_last()}
    result = {"workload": workload, **asdict(level), **share}
    _say(server.key, result)
    return result


def _gateway(server: ServerPeer, prompts: Prompts, scale: Scale, seed: str) -> list[dict[str, Any]]:
    """Base requests through the gateway and straight to the worker, in turns."""
    assert isinstance(server, Loraplex)
    levels = []
    for number in range(scale.num_pairs):
        for size in scale.concurrencies:
            for name, url in (
                ("gateway: through", server.url),
                ("gateway: past", server.worker_url),
            ):
                wanted = requests(
                    "gateway",
                    concurrency=size,
                    adapters=(),
                    prompts=prompts,
                    scale=scale,
                    seed=f"{seed} {name} {number}",
                )
                levels.append(_level(server, name, wanted, size, scale, url=url))
    return levels


def _warm_up(server: ServerPeer, prompts: Prompts, scale: Scale, seed: str) -> None:
    """Fill every place once with the base, then let each adapter answer once."""
    adapters = server.setup.adapters
    asked = [None] * scale.max_concurrency + list(adapters)
    ids = prompts.take(len(asked), num_tokens=scale.prompt_tokens, seed=f"{seed} warm")
    calls = [server.call(one, adapter) for one, adapter in zip(ids, asked, strict=True)]
    for part in (calls[: scale.max_concurrency], calls[scale.max_concurrency :]):
        asyncio.run(
            run_level(server.url, part, concurrency=scale.max_concurrency, max_tokens=WARM_TOKENS)
        )


async def _cold_adapters(
    server: ServerPeer, cold: tuple[Adapter, ...], prompts: Prompts, scale: Scale, seed: str
) -> dict[str, Any]:
    """Adapters that were never seen arrive one by one, while the base answers others.

    first_token_s is from having the files to the first token: the load call and the request.
    """
    ended = asyncio.Event()
    bystanders: list[Timing] = []
    others = OthersWatch(server.pid)
    ids = prompts.take(len(cold), num_tokens=scale.prompt_tokens, seed=f"{seed} cold")

    async def keep_asking(number: int) -> None:
        asked = prompts.take(512, num_tokens=scale.prompt_tokens, seed=f"{seed} by {number}")
        for one in asked:
            if ended.is_set():
                return
            call = server.call(one, None)
            timing = await stream_completion(server.url, call, max_tokens=scale.output_tokens)
            bystanders.append(timing)

    async def bring_in() -> list[tuple[float, float]]:
        times = []
        for adapter, one in zip(cold, ids, strict=True):
            call = server.call(one, adapter)
            times.append(await _bring_in(server, adapter, call))
        ended.set()
        return times

    times, *_ = await asyncio.gather(
        bring_in(), *(keep_asking(number) for number in range(BYSTANDERS))
    )
    firsts_s = [first for _, first in times]
    gaps_s = [gap for timing in bystanders for gap in _gaps(timing)]
    return {
        "num_adapters": len(cold),
        "bystanders": BYSTANDERS,
        "load_p50_s": round(statistics.median(load for load, _ in times), 3),
        "first_token_p50_s": round(statistics.median(firsts_s), 3),
        "first_token_max_s": round(max(firsts_s), 3),
        "bystanders_gap_p50_ms": round(1000 * statistics.median(gaps_s), 1),
        "bystanders_gap_max_ms": round(1000 * max(gaps_s), 1),
        "others_cores": others.num_cores_since_last(),
    }


async def _bring_in(server: ServerPeer, adapter: Adapter, call: Call) -> tuple[float, float]:
    """Load an adapter and ask it; seconds until the load is answered, and until the first text."""
    started_s = time.perf_counter()
    await asyncio.to_thread(server.load, adapter)
    loaded_s = time.perf_counter()
    timing = await stream_completion(server.url, call, max_tokens=WARM_TOKENS)
    return loaded_s - started_s, timing.text_times_s[0] - started_s


def _gaps(timing: Timing) -> Iterator[float]:
    times_s = timing.text_times_s
    yield from (later - sooner for sooner, later in pairwise(times_s))


def _say(key: str, figures: dict[str, Any]) -> None:
    print(f"  {key}: {json.dumps(figures)}", flush=True)
