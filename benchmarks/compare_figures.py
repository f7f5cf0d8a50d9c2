"""Medians over the rounds of compare.py, and the ratios between systems, as tables."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import MAX_OTHERS_CORES

OURS = "loraplex"
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"
NOTHING = "-"
THROUGH, PAST = "gateway: through", "gateway: past"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A ratio that is held to, at each of some concurrencies: ours over the best of `peers`."""

    workload: str
    peers: tuple[str, ...]
    at_least: dict[int, float]
    of_workload: str | None = None  # the other side's workload, if it is another


VLLM = ("vllm", "vllm-preload")
TARGETS = (
    Target(workload="base", peers=VLLM, at_least={1: 1.05, 8: 1.15, 32: 1.15}),
    Target(workload="base", peers=("llama.cpp",), at_least={1: 0.95, 8: 1.8, 32: 1.6}),
    Target(workload="base", peers=("openvino",), at_least={1: 1.05, 8: 1.1, 32: 1.1}),
    Target(workload="one adapter", peers=("openvino",), at_least={1: 1.8, 8: 1.8, 32: 1.4}),
    Target(workload="all distinct", peers=VLLM, at_least={1: 3.3, 8: 4, 32: 4.5}),
    Target(workload="all distinct", peers=("llama.cpp",), at_least={1: 1.1, 8: 4, 32: 6.5}),
    Target(workload="all distinct", peers=("peft",), at_least={1: 3.5, 8: 6, 32: 8}),
    Target(
        workload="all distinct",
        peers=(OURS,),
        at_least={1: 0.85, 8: 0.8, 32: 0.72},
        of_workload="base",
    ),
    Target(workload="prefix: again", peers=VLLM, at_least={32: 1.1}),
    Target(workload="prefix, one adapter: again", peers=VLLM, at_least={32: 3}),
    Target(workload=THROUGH, peers=(OURS,), at_least={32: 0.97}, of_workload=PAST),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The medians of one system, workload and concurrency over the rounds.

    is_disturbed   others took time on the machine in every round
    """

    output_tokens_per_s: float
    ttft_p50_s: float
    inter_token_p50_ms: float
    num_rounds: int
    is_disturbed: bool


Cells = dict[tuple[str, str, int], Cell]  # by system, workload and concurrency


def cells(records: Iterable[dict[str, Any]]) -> Cells:
    """Medians of all levels; rounds in which others took time count only if there are no others."""
    levels: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for record in records:
        for level in record.get("levels", []):
            key = (record["peer"], level["workload"], level["concurrency"])
            levels.setdefault(key, []).append(level)
    return {key: _cell(found) for key, found in levels.items()}


def ratio(found: Cells, target: Target, concurrency: int) -> float | None:
    """Ours over the fastest of the target's peers; None where one side wasn't measured."""
    ours = found.get((OURS, target.workload, concurrency))
    other = target.of_workload or target.workload
    theirs = [
        found[peer, other, concurrency].output_tokens_per_s
        for peer in target.peers
        if (peer, other, concurrency) in found
    ]
    if ours is None or not theirs:
        return None
    return ours.output_tokens_per_s / max(theirs)


def speed_table(found: Cells, titles: dict[str, str]) -> str:
    """A line for each system and workload."""
    sizes = sorted({size for _, _, size in found})
    names = list(dict.fromkeys(name for _, name, _ in found))
    lines = [
        "| workload | system | " + " | ".join(f"concurrency {size}" for size in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for name in names:
        for peer in titles:
            row = [found.get((peer, name, size)) for size in sizes]
            if any(row):
                shown = " | ".join(NOTHING if cell is None else _shown(cell) for cell in row)
                lines.append(f"| {name} | {titles[peer]} | {shown} |")
    if any(cell.is_disturbed for cell in found.values()):
        lines += ["", f"† other processes took over {MAX_OTHERS_CORES} cores in every round."]
    return "\n".join(lines)


def ratio_table(found: Cells, titles: dict[str, str]) -> str:
    """A line for each target of which something was measured; what isn't reached is bold."""
    sizes = sorted({size for target in TARGETS for size in target.at_least})
    lines = [
        "| ratio of output tok/s | " + " | ".join(f"concurrency {size}" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for target in TARGETS:
        row = [_compared(found, target, size) for size in sizes]
        if any(shown != NOTHING for shown in row):
            lines.append(f"| {_sentence(target, titles)} | " + " | ".join(row) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def prefix_table(found: Cells, titles: dict[str, str]) -> str:
    """What a prefix that is there already brings; empty if none was measured."""
    lines = [
        "| long prefix | system | TTFT, each its own | TTFT, a new one shared | TTFT, that again | "
        "own : again |",
        "|---|---|---|---|---|---|",
    ]
    for peer, workload, size in found:
        name, _, kind = workload.rpartition(": ")
        if kind != "again" or peer not in titles:
            continue
        own, new, again = (
            found[peer, f"{name}: {one}", size].ttft_p50_s for one in ("own", "new", "again")
        )
        lines.append(
            f"| {name} | {titles[peer]} | {own:.2f} s | {new:.2f} s | {again:.2f} s | "
            f"{own / max(again, 1e-3):.1f} |"
        )
    return "\n".join(lines) if len(lines) > 2 else ""


def start_table(records: Sequence[dict[str, Any]], titles: dict[str, str]) -> str:
    """Start-up and peak memory of each system, by what it was started for."""
    lines = [
        "| system | started for | ready | first token | peak memory (PSS) |",
        "|---|---|---|---|---|",
    ]
    starts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if "levels" in record:
            starts.setdefault((record["peer"], record["group"]), []).append(record)
    for (peer, group), found in sorted(
        starts.items(), key=lambda item: list(titles).index(item[0][0])
    ):
        peak = max(record["peak_pss_bytes"] for record in found)
        adapters, room = found[0]["num_adapters"], found[0].get("num_kv_tokens")
        asked = f"{group}: {adapters} adapters" + ("" if room is None else f", {room} KV tokens")
        lines.append(
            f"| {titles[peer]} | {asked} | {_seconds(found, 'start_s')} | "
            f"{_seconds(found, 'first_token_s')} | {peak / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def cold_table(records: Iterable[dict[str, Any]], titles: dict[str, str]) -> str:
    """Adapters that arrive while the base answers others; empty if none was measured."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if "cold" in record:
            found.setdefault(record["peer"], []).append(record["cold"])
    if not found:
        return ""
    lines = [
        "| adapters never seen before, while the base answers others | load call | files to first "
        "token, median | worst | others: between texts, median | worst |",
        "|---|---|---|---|---|---|",
    ]
    for peer, colds in found.items():
        load, first = (_median(colds, name) for name in ("load_p50_s", "first_token_p50_s"))
        gap = _median(colds, "bystanders_gap_p50_ms")
        worst = max(cold["first_token_max_s"] for cold in colds)
        longest = max(cold["bystanders_gap_max_ms"] for cold in colds)
        lines.append(
            f"| {titles[peer]} | {load:.2f} s | {first:.2f} s | {worst:.2f} s | {gap:.0f} ms | "
            f"{longest:.0f} ms |"
        )
    return "\n".join(lines)


def flag_list(records: Iterable[dict[str, Any]], titles: dict[str, str]) -> str:
    """How each system was started, once for each group."""
    flags = {
        (record["peer"], record["group"]): record["flags"]
        for record in records
        if "flags" in record
    }
    return "\n".join(
        f"- {titles[peer]}, {group}: `{line}`" for (peer, group), line in flags.items()
    )


def left_out_list(left_out: Iterable[dict[str, str]], titles: dict[str, str]) -> str:
    """What wasn't measured, and why."""
    return "\n".join(
        f"- left out: {titles[one['peer']]}, {one['what']}: {one['why']}" for one in left_out
    )


def update_readme(path: Path, body: str) -> None:
    """Replace what stands between the two marks."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


def _cell(levels: Sequence[dict[str, Any]]) -> Cell:
    quiet = [level for level in levels if level["others_cores"] <= MAX_OTHERS_CORES]
    used = quiet or levels
    return Cell(
        output_tokens_per_s=_median(used, "output_tokens_per_s"),
        ttft_p50_s=_median(used, "ttft_p50_s"),
        inter_token_p50_ms=_median(used, "inter_token_p50_ms"),
        num_rounds=len(used),
        is_disturbed=not quiet,
    )


def _median(found: Iterable[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in found)


def _shown(cell: Cell) -> str:
    mark = "† " if cell.is_disturbed else ""
    return (
        f"{mark}**{cell.output_tokens_per_s:.0f}** tok/s, "
        f"TTFT {cell.ttft_p50_s:.2f} s, {cell.inter_token_p50_ms:.1f} ms/token"
    )


def _compared(found: Cells, target: Target, concurrency: int) -> str:
    wanted = target.at_least.get(concurrency)
    reached = ratio(found, target, concurrency)
    if wanted is None or reached is None:
        return NOTHING
    shown = f"{reached:.2f} (≥ {wanted:g})"
    return shown if reached >= wanted else f"**{shown}**"


def _sentence(target: Target, titles: dict[str, str]) -> str:
    if target.of_workload is not None:
        return f"{target.workload}, against our own {target.of_workload}"
    names = " or ".join(titles[peer] for peer in target.peers)
    better = ", the better" if len(target.peers) > 1 else ""
    return f"{target.workload}, against {names}{better}"


def _seconds(found: Sequence[dict[str, Any]], name: str) -> str:
    values = [one[name] for one in found if one.get(name)]
    if not values:
        return NOTHING
    worst = f", at worst {max(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f} s{worst}"
