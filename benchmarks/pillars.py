"""What does each pillar of the engine bring? Each is measured on and off, in one run.

Paged KV against a whole context reserved for each sequence; continuous against static batching;
a shared prefix found or computed again, and what looking for one costs; others' time between
tokens while a long prompt comes in, chunked or not; base traffic with LoRA enabled but unused.

In one process, on the default model in bf16, without HTTP. Prints a table, and writes
results/pillars-<date>.json and .svg; `--update-readme` puts both into README.md. `--rehearse` is a
minute's run whose figures mean nothing.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pillar_runs as runs
from one_openmp import start_as_a_core
from pillar_figures import draw, markdown_table
from processes import OthersWatch
from provenance import describe_run
from readme_section import replace_section
from report import describe

from engine.llm import LLM
from engine.model.default_model import find_default_model

HERE = Path(__file__).resolve().parent
MEMORY_BYTES = 2 * 1024**3


def measurements(
    scale: runs.Scale, *, state_dir: Path, scratch: Path, num_threads: int | None
) -> dict[str, Callable[[], Any]]:
    """The pillars by name, each ready to be measured."""
    open_llm = partial(
        LLM,
        str(find_default_model()),
        state_dir=str(state_dir),
        dtype="bf16",
        memory_bytes=MEMORY_BYTES,
        num_threads=num_threads,
    )
    return {
        "kv_memory": partial(runs.kv_memory, open_llm, scale),
        "continuous_batching": partial(runs.continuous_batching, open_llm, scale),
        "prefix_cache": partial(runs.prefix_cache, open_llm, scale),
        "chunked_prefill": partial(runs.chunked_prefill, open_llm, scale),
        "idle_lora": partial(runs.idle_lora, open_llm, scale, scratch=scratch),
    }


def main() -> None:
    """Measure, print, write."""
    start_as_a_core()
    parser = argparse.ArgumentParser(description="measure each pillar of the engine on and off")
    parser.add_argument("--only", nargs="*", metavar="PILLAR", help="measure only these")
    parser.add_argument("--rehearse", action="store_true", help="small sizes; writes nothing")
    parser.add_argument("--update-readme", action="store_true", help="put the table in README.md")
    parser.add_argument("--num-threads", type=int, help="of the products; by default all cores")
    parser.add_argument("--state-dir", type=Path, help="keeps the converted model between runs")
    args = parser.parse_args()
    now = datetime.now(UTC)
    scale = runs.REHEARSAL if args.rehearse else runs.FULL
    result = describe_run(now, libraries=("torch",))
    result["scale"] = {name: getattr(scale, name) for name in scale.__dataclass_fields__}
    result["pillars"] = {}
    with tempfile.TemporaryDirectory(prefix="loraplex-pillars-") as root:
        state_dir = args.state_dir or Path(root)
        wanted = measurements(
            scale, state_dir=state_dir, scratch=Path(root), num_threads=args.num_threads
        )
        for name in args.only or wanted:
            others = OthersWatch(os.getpid())
            figures = wanted[name]()
            share = {"others_cores": others.num_cores_since_last()}
            result["pillars"][name] = figures | share
            print(f"{name}: {json.dumps(result['pillars'][name])}", flush=True)
    report = f"{describe(result)}.\n\n{markdown_table(result['pillars'])}"
    print(report)
    if args.rehearse:
        return
    path = HERE / "results" / f"pillars-{now:%Y-%m-%dT%H%M}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    plot = path.with_suffix(".svg")
    draw(result["pillars"], plot)
    if args.update_readme:
        link = f"![each pillar on and off]({plot.relative_to(HERE)})"
        replace_section("pillars", f"{report}\n\n{link}")
    print(f"written to {path.relative_to(HERE.parent)} and .svg")


if __name__ == "__main__":
    main()
