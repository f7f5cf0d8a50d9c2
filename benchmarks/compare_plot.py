"""The plot of compare.py: output tok/s of each system, a panel for each workload."""

from pathlib import Path

from compare_figures import OURS, Cells
from matplotlib import pyplot as plt

PANELS = ("base", "one adapter", "all distinct", "zipf")
COLOURS = {
    OURS: "#2f6f9f",
    "vllm": "#c98b2b",
    "vllm-preload": "#e3bf7f",
    "llama.cpp": "#6b8f4e",
    "openvino": "#8a6fa8",
    "peft": "#b9b9b9",
}


def draw(found: Cells, titles: dict[str, str], path: Path) -> None:
    """Groups of bars by concurrency; workloads that nobody ran have no panel."""
    panels = [name for name in PANELS if any(workload == name for _, workload, _ in found)]
    if not panels:
        return
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.6), squeeze=False, layout="constrained"
    )
    sizes = sorted({size for _, workload, size in found if workload in panels})
    shown = [peer for peer in titles if any(key[0] == peer and key[1] in panels for key in found)]
    width = 0.8 / len(shown)
    for axis, panel in zip(axes[0], panels, strict=True):
        for place, peer in enumerate(shown):
            heights = {
                number + (place - (len(shown) - 1) / 2) * width: found[peer, panel, size]
                for number, size in enumerate(sizes)
                if (peer, panel, size) in found
            }
            axis.bar(
                list(heights),
                [cell.output_tokens_per_s for cell in heights.values()],
                width,
                color=COLOURS.get(peer),
                label=titles[peer],
            )
        axis.set_title(panel, fontsize=10)
        axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axis.set_xlabel("requests in flight", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("output tokens/s, end to end", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(shown), fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
