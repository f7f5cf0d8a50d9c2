"""Turns one result of serving.py into the table of README.md."""

from typing import Any

SYSTEMS = {"loraplex": "Loraplex, HTTP streaming", "peft": "transformers + PEFT, in process"}
MAX_OTHERS_CORES = 0.1


def markdown_table(result: dict[str, Any]) -> str:
    """One line for each system and workload: tok/s, TTFT and inter-token time by concurrency."""
    measured = {key: name for key, name in SYSTEMS.items() if key in result}
    sizes = sorted({level["concurrency"] for level in result["loraplex"]["levels"]})
    lines = [
        "| system | workload | " + " | ".join(f"concurrency {size}" for size in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for key, name in measured.items():
        levels = {(one["workload"], one["concurrency"]): one for one in result[key]["levels"]}
        for workload in dict.fromkeys(workload for workload, _ in levels):
            cells = " | ".join(_cell(levels[workload, size]) for size in sizes)
            lines.append(f"| {name} | {workload} | {cells} |")
    every = [level for key in measured for level in result[key]["levels"]]
    if any(_is_disturbed(level) for level in every):
        lines += ["", f"† other processes took over {MAX_OTHERS_CORES} cores meanwhile; too slow."]
    lines += ["", "| system | start | peak memory (PSS) |", "|---|---|---|"]
    for key, name in measured.items():
        start = f"{result[key]['start_s']:.1f} s"
        if "first_start_s" in result[key]:
            start += f" (the very first {result[key]['first_start_s']:.1f} s)"
        lines.append(f"| {name} | {start} | {result[key]['peak_pss_bytes'] / 1e9:.2f} GB |")
    return "\n".join(lines)


def describe(result: dict[str, Any]) -> str:
    """Where, when and how a result was measured."""
    machine, versions = result["machine"], result["versions"]
    return (
        f"{result['date'][:10]}, commit {result['commit']}, `{result['command']}`: "
        f"{machine['cpu']}, {machine['num_cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; load average before: {machine['load_before'][0]}"
    )


def _is_disturbed(level: dict[str, Any]) -> bool:
    return bool(level["others_cores"] > MAX_OTHERS_CORES)


def _cell(level: dict[str, Any]) -> str:
    mark = "† " if _is_disturbed(level) else ""
    return (
        f"{mark}**{level['output_tokens_per_s']:.0f}** tok/s, "
        f"TTFT {level['ttft_p50_s']:.2f} s, {level['inter_token_p50_ms']:.0f} ms/token"
    )
