"""OpenVINO GenAI at the same work: continuous batches in this process, no HTTP.

Run by compare.py in an environment of its own. Reads a plan as JSON on stdin, writes one JSON
line for each level on stdout. Converts the model once, beside the original.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

KV_BYTES_PER_TOKEN = 23_040  # of the default model in bf16
PROPERTIES = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}


def converted(model_dir: Path) -> Path:
    """The model as OpenVINO wants it; made by optimum once."""
    folder = model_dir.with_name(f"{model_dir.name}-openvino")
    if not (folder / "openvino_model.xml").exists():
        cli = Path(sys.executable).with_name("optimum-cli")
        subprocess.run(
            [
                *(str(cli), "export", "openvino", "--model", str(model_dir)),
                *("--task", "text-generation-with-past", "--weight-format", "fp16", str(folder)),
            ],
            check=True,
            stdout=sys.stderr,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    return folder


def open_pipeline(plan: dict[str, Any], folder: Path, adapter: Any) -> Any:
    """The pipeline in bf16, its KV cache too, with as many threads as the others."""
    scheduler = openvino_genai.SchedulerConfig()
    needed_gib = plan["num_kv_tokens"] * KV_BYTES_PER_TOKEN / 2**30
    scheduler.cache_size = max(1, round(needed_gib))
    scheduler.max_num_seqs = max(level["concurrency"] for level in plan["levels"])
    properties = {**PROPERTIES, "INFERENCE_NUM_THREADS": plan["num_threads"]}
    if adapter is not None:
        properties["adapters"] = openvino_genai.AdapterConfig(adapter)
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def generate(
    pipeline: Any, prompts: list[list[int]], *, max_tokens: int, adapter: Any
) -> dict[str, float]:
    """Generate for all prompts at once; return times in seconds."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.min_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    if adapter is not None:
        config.adapters = openvino_genai.AdapterConfig(adapter)
    inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
    started_s = time.perf_counter()
    results = pipeline.generate(inputs, [config] * len(prompts))
    wall_s = time.perf_counter() - started_s
    for result in results:
        assert len(result.m_generation_ids[0]) == max_tokens
    metrics = [result.perf_metrics for result in results]
    return {
        "wall_s": wall_s,
        "ttft_s": statistics.median(one.get_ttft().mean for one in metrics) / 1000,
        "inter_token_ms": statistics.median(one.get_tpot().mean for one in metrics),
    }


def run_level(
    pipeline: Any, level: dict[str, Any], *, max_tokens: int, adapter: Any
) -> dict[str, Any]:
    """As many prompts at once as the level's concurrency, until all are done."""
    size, prompts = level["concurrency"], level["prompts"]
    times = [
        generate(pipeline, prompts[start : start + size], max_tokens=max_tokens, adapter=adapter)
        for start in range(0, len(prompts), size)
    ]
    wall_s = sum(one["wall_s"] for one in times)
    num_tokens = len(prompts) * max_tokens
    return {
        "workload": level["workload"],
        "concurrency": size,
        "num_requests": len(prompts),
        "num_output_tokens": num_tokens,
        "wall_s": round(wall_s, 3),
        "output_tokens_per_s": round(num_tokens / wall_s, 1),
        "ttft_p50_s": round(statistics.median(one["ttft_s"] for one in times), 3),
        "ttft_max_s": round(max(one["ttft_s"] for one in times), 3),
        "inter_token_p50_ms": round(statistics.median(one["inter_token_ms"] for one in times), 1),
    }


def main() -> None:
    """Convert the model that is named, or run the plan.

    Base levels run on a pipeline without adapters, the rest on one with them.
    """
    if sys.argv[1:]:
        converted(Path(sys.argv[1]))
        return
    plan = json.load(sys.stdin)
    folder = converted(Path(plan["model_dir"]))
    pipeline, adapter = None, None
    for level in plan["levels"]:
        wants_adapter = level["workload"] != "base"
        if pipeline is None or wants_adapter != (adapter is not None):
            started_s = time.perf_counter()
            weights = Path(plan["adapters"][0]) / "adapter_model.safetensors"
            adapter = openvino_genai.Adapter(weights) if wants_adapter else None
            pipeline = open_pipeline(plan, folder, adapter)
            if level is plan["levels"][0]:
                seconds = round(time.perf_counter() - started_s, 2)
                flags = " ".join(f"{name}={value}" for name, value in PROPERTIES.items())
                flags += f" INFERENCE_NUM_THREADS={plan['num_threads']}, the rest by default"
                print(json.dumps({"start_s": seconds, "flags": flags}), flush=True)
            generate(pipeline, level["prompts"][:1], max_tokens=4, adapter=adapter)
        result = run_level(pipeline, level, max_tokens=plan["max_tokens"], adapter=adapter)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
