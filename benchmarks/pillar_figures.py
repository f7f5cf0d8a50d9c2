"""The table and the plot of pillars.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from report import MAX_OTHERS_CORES

ON, OFF = "#2f6f9f", "#b9b9b9"
MB = 1e6


def markdown_table(pillars: dict[str, Any]) -> str:
    """One line for each thing that was measured on both sides."""
    lines = ["| pillar | measured | on | off |", "|---|---|---|---|"]
    rows: dict[str, Callable[[Any], list[tuple[str, str, str]]]] = {
        "kv_memory": _kv_rows,
        "continuous_batching": _batching_rows,
        "prefix_cache": _prefix_rows,
        "chunked_prefill": _chunk_rows,
        "idle_lora": _lora_rows,
    }
    for name, figures in pillars.items():
        mark = "† " if _is_disturbed(figures) else ""
        for measured, on, off in rows[name](figures):
            lines.append(f"| {mark}{name.replace('_', ' ')} | {measured} | {on} | {off} |")
    if any(map(_is_disturbed, pillars.values())):
        lines += ["", f"† other processes took over {MAX_OTHERS_CORES} cores meanwhile."]
    return "\n".join(lines)


def draw(pillars: dict[str, Any], path: Path) -> None:
    """Draw one panel for each pillar that was measured."""
    panels: dict[str, Callable[[Axes, Any], None]] = {
        "kv_memory": _draw_kv,
        "continuous_batching": _draw_batching,
        "prefix_cache": _draw_prefix,
        "chunked_prefill": _draw_chunks,
        "idle_lora": _draw_lora,
    }
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(
        1, len(pillars), figsize=(3.4 * len(pillars), 3.4), squeeze=False, layout="constrained"
    )
    for axis, (name, figures) in zip(axes[0], pillars.items(), strict=True):
        panels[name](axis, figures)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.title.set_fontsize(9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _is_disturbed(figures: Any) -> bool:
    return bool(figures["others_cores"] > MAX_OTHERS_CORES)


def _kv_rows(figures: Any) -> list[tuple[str, str, str]]:
    fit = figures["sequences_that_fit"]
    return [
        (
            "KV memory, mean",
            f"{figures['held_bytes_mean'] / MB:.0f} MB",
            f"{figures['reserved_bytes_mean'] / MB:.0f} MB",
        ),
        (
            "KV memory, peak",
            f"{figures['held_bytes_peak'] / MB:.0f} MB",
            f"{figures['reserved_bytes_peak'] / MB:.0f} MB",
        ),
        ("sequences that fit", str(fit["paged"]), str(fit["reserved"])),
    ]


def _batching_rows(figures: Any) -> list[tuple[str, str, str]]:
    on, off = figures["on"], figures["off"]
    return [
        (
            f"batch {figures['batch']}, answers of mixed length",
            f"{on['output_tokens_per_s']:.0f} tok/s",
            f"{off['output_tokens_per_s']:.0f} tok/s",
        )
    ]


def _prefix_rows(figures: Any) -> list[tuple[str, str, str]]:
    ttft_s = figures["ttft_s"]
    return [
        (
            f"TTFT, {figures['prefix_tokens']} tokens of prefix {kind}",
            f"{1000 * ttft_s[f'{kind} on']:.0f} ms",
            f"{1000 * ttft_s[f'{kind} off']:.0f} ms",
        )
        for kind in ("shared", "unshared")
    ] + [("cost where nothing is shared", f"{100 * figures['unshared_cost']:+.1f} %", "")]


def _chunk_rows(figures: Any) -> list[tuple[str, str, str]]:
    off = figures["whole prompt in a step"]
    rows = []
    for budget in ("512", "128"):
        on = figures[budget]
        rows += [
            (
                f"longest gap of bystanders, {budget} tokens a step",
                f"{on['gap_max_ms']:.0f} ms",
                f"{off['gap_max_ms']:.0f} ms",
            ),
            (
                f"TTFT of the long prompt, {budget} tokens a step",
                f"{on['ttft_s']:.2f} s",
                f"{off['ttft_s']:.2f} s",
            ),
        ]
    return rows


def _lora_rows(figures: Any) -> list[tuple[str, str, str]]:
    low, high = figures["cost_quartiles"]
    return [
        (
            f"step of base traffic, batch {figures['batch']}",
            f"{figures['step_ms']['on']:.2f} ms",
            f"{figures['step_ms']['off']:.2f} ms",
        ),
        (
            "cost, median of pairs (quartiles)",
            f"{100 * figures['cost']:+.1f} % ({100 * low:+.1f} … {100 * high:+.1f})",
            "",
        ),
    ]


def _bars(axis: Axes, values: dict[str, float], *, title: str, unit: str) -> None:
    """Bars whose first one is ours."""
    colours = [ON, *[OFF] * (len(values) - 1)]
    bars = axis.bar(list(values), list(values.values()), color=colours)
    axis.bar_label(
        bars, fmt=lambda value: f"{value:.0f}" if value >= 100 else f"{value:.3g}", fontsize=8
    )
    axis.set_title(title)
    axis.set_ylabel(unit, fontsize=8)


def _draw_kv(axis: Axes, figures: Any) -> None:
    values = {
        "paged": figures["held_bytes_mean"] / MB,
        "reserved": figures["reserved_bytes_mean"] / MB,
    }
    _bars(axis, values, title="KV memory held", unit="MB, mean")


def _draw_batching(axis: Axes, figures: Any) -> None:
    values = {
        "continuous": figures["on"]["output_tokens_per_s"],
        "static": figures["off"]["output_tokens_per_s"],
    }
    _bars(axis, values, title="Answers of mixed length", unit="tokens/s")


def _draw_prefix(axis: Axes, figures: Any) -> None:
    ttft_s = figures["ttft_s"]
    values = {
        "found": 1000 * ttft_s["shared on"],
        "cache off": 1000 * ttft_s["shared off"],
        "unshared": 1000 * ttft_s["unshared on"],
    }
    _bars(axis, values, title=f"TTFT, prefix of {figures['prefix_tokens']} tokens", unit="ms")


def _draw_chunks(axis: Axes, figures: Any) -> None:
    values = {
        "128": figures["128"]["gap_max_ms"],
        "512": figures["512"]["gap_max_ms"],
        "whole": figures["whole prompt in a step"]["gap_max_ms"],
    }
    title = f"Bystanders while {figures['prompt_tokens']} tokens come in"
    _bars(axis, values, title=title, unit="longest gap, ms")


def _draw_lora(axis: Axes, figures: Any) -> None:
    step_ms = figures["step_ms"]
    values = {"LoRA enabled": step_ms["on"], "LoRA off": step_ms["off"]}
    _bars(axis, values, title="Base traffic, an adapter idle", unit="ms a step")
