"""How fast does it serve: the base, one adapter, and a different adapter for each request?

128 prompt tokens in, 64 out, greedy, streamed over HTTP through the gateway, at concurrency 1, 8
and 32; beside transformers + PEFT on the same prompts in the same run. `make bench` runs it,
prints the table and writes results/<date>.json.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from harness import Call, run_level
from processes import LoraplexServer, MemoryWatch, OthersWatch
from provenance import describe_run
from random_adapters import write_adapter
from readme_section import replace_section
from report import describe, markdown_table
from transformers import AutoConfig

from gateway.embedded.default_model import SERVED_NAME, find_default_model

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
LORA_RANK = 16
CONCURRENCIES = (1, 8, 32)
WORKLOADS = ("base", "one adapter", "all distinct")
TEXT = (
    "The harbour was quiet that morning, and the fishermen had already mended their nets. "
    "A letter lay on the table; nobody had opened it since the ship went out in the spring. "
    "Rain began to fall on the roofs, first slowly, then all at once, as it does in the north."
)


def num_requests(concurrency: int) -> int:
    """Two rounds at least, and no fewer than four requests."""
    return max(4, 2 * concurrency)


def make_prompts(url: str, count: int) -> list[list[int]]:
    """Different prompts of exactly PROMPT_TOKENS ids: a text's ids, shuffled by number."""
    body = {"model": SERVED_NAME, "prompt": TEXT, "add_special_tokens": False}
    ids = httpx.post(f"{url}/tokenize", json=body, timeout=60).raise_for_status().json()["tokens"]
    prompts = []
    for number in range(count):
        shuffled = ids * (1 + PROMPT_TOKENS // len(ids))
        random.Random(number).shuffle(shuffled)
        prompts.append(shuffled[:PROMPT_TOKENS])
    return prompts


def push_adapters(url: str, folders: list[Path]) -> None:
    """Upload every adapter and let each answer once, so that all are resident."""
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as client:
        for folder in folders:
            files = [("files", (path.name, path.read_bytes())) for path in folder.iterdir()]
            pushed = client.post("/v1/adapters", data={"name": folder.name}, files=files)
            pushed.raise_for_status()
            body = {"model": f"{SERVED_NAME}:{folder.name}", "prompt": "Hi", "max_tokens": 2}
            client.post("/v1/completions", json=body).raise_for_status()


def model_names(workload: str, adapters: list[str], count: int) -> list[str]:
    """Which model each request asks."""
    if workload == "base":
        return [SERVED_NAME] * count
    used = adapters[:1] if workload == "one adapter" else adapters
    return [f"{SERVED_NAME}:{used[index % len(used)]}" for index in range(count)]


def measure_loraplex(
    folders: list[Path], concurrencies: list[int]
) -> tuple[dict[str, Any], list[list[int]]]:
    """Start a server and run all levels; also returns the prompts, for the baseline."""
    options = (str(find_default_model()), "--served-model-name", SERVED_NAME, "--dtype", "bf16")
    levels = []
    with LoraplexServer(*options) as server:
        prompts = make_prompts(server.url, num_requests(max(concurrencies)))
        push_adapters(server.url, folders)
        for workload in WORKLOADS:
            for concurrency in concurrencies:
                count = num_requests(concurrency)
                names = model_names(workload, [folder.name for folder in folders], count)
                calls = [
                    Call(model=name, prompt_ids=ids)
                    for name, ids in zip(names, prompts, strict=False)
                ]
                others = OthersWatch(server.pid)
                level = asyncio.run(
                    run_level(server.url, calls, concurrency=concurrency, max_tokens=OUTPUT_TOKENS)
                )
                share = {"others_cores": others.num_cores_since_last()}
                levels.append({"workload": workload, **asdict(level), **share})
                print(f"loraplex: {levels[-1]}", flush=True)
    result = {
        "first_start_s": server.first_start_s,
        "start_s": server.start_s,
        "peak_pss_bytes": server.memory.peak_pss_bytes,
        "peak_rss_bytes": server.memory.peak_rss_bytes,
        "levels": levels,
    }
    return result, prompts


def measure_peft(
    folders: list[Path], concurrencies: list[int], prompts: list[list[int]]
) -> dict[str, Any]:
    """Run the same levels in a process with transformers and PEFT."""
    plan = {
        "gguf": str(find_default_model()),
        "adapters": [str(folder) for folder in folders],
        "max_tokens": OUTPUT_TOKENS,
        "levels": [
            _peft_level(workload, concurrency, [folder.name for folder in folders], prompts)
            for workload in WORKLOADS
            for concurrency in concurrencies
        ],
    }
    process = subprocess.Popen(
        [sys.executable, str(HERE / "peft_baseline.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    memory = MemoryWatch(process.pid)
    memory.start()
    try:
        lines = _talk(process, plan)
    finally:
        memory.stop()
        process.kill()
    if process.wait() != 0:
        raise SystemExit(f"peft_baseline.py ended with {process.returncode}")
    return {
        **lines[0],
        "peak_pss_bytes": memory.peak_pss_bytes,
        "peak_rss_bytes": memory.peak_rss_bytes,
        "levels": lines[1:],
    }


def _talk(process: subprocess.Popen[str], plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the plan, and return the lines of the answer when the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin:
        json.dump(plan, stdin)
    lines = []
    others = OthersWatch(process.pid)
    for line in process.stdout:
        lines.append(json.loads(line) | {"others_cores": others.num_cores_since_last()})
        print(f"peft: {lines[-1]}", flush=True)
    process.wait()
    return lines


def _peft_level(
    workload: str, concurrency: int, adapters: list[str], prompts: list[list[int]]
) -> dict[str, Any]:
    count = num_requests(concurrency)
    names = [adapters[index % len(adapters)] for index in range(count)]
    return {
        "workload": workload,
        "concurrency": concurrency,
        "prompts": prompts[:count],
        "adapter_names": names if workload == "all distinct" else None,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="measure serving speed")
    parser.add_argument("--concurrency", type=int, nargs="*", default=list(CONCURRENCIES))
    parser.add_argument("--update-readme", action="store_true", help="put the table in README.md")
    parser.add_argument("--no-peft", action="store_true", help="measure only Loraplex")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end with us
    now = datetime.now(UTC)
    result: dict[str, Any] = {
        **describe_run(now, libraries=("torch", "transformers", "peft")),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "lora_rank": LORA_RANK,
    }
    with tempfile.TemporaryDirectory(prefix="loraplex-bench-adapters-") as root:
        gguf = find_default_model()
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        folders = [Path(root) / f"random-{number:02}" for number in range(max(args.concurrency))]
        for number, folder in enumerate(folders):
            write_adapter(folder, config, lora_rank=LORA_RANK, seed=number)
        result["loraplex"], prompts = measure_loraplex(folders, args.concurrency)
        if not args.no_peft:
            result["peft"] = measure_peft(folders, args.concurrency, prompts)
    path = HERE / "results" / f"{now:%Y-%m-%dT%H%M}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    report = f"{describe(result)}.\n\n{markdown_table(result)}"
    if args.update_readme:
        replace_section("serving", report)
    print(report)
    print(f"written to {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
