"""transformers + PEFT at the same work: static batches in this process, no HTTP.

Run by serving.py as a process of its own, so that its memory can be measured. Reads a plan as
JSON on stdin, writes one JSON line for each level on stdout.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    GgufConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging


class Clock(StoppingCriteria):
    """Notes when each token of a batch is there; never stops it."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any
    ) -> torch.BoolTensor:
        self.times_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load_base(gguf: Path) -> Any:
    """The default base in bf16."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval()


def load_adapters(model: Any, adapters: list[str]) -> Any:
    """A PeftModel with every adapter loaded, named by its folder."""
    paths = [Path(adapter) for adapter in adapters]
    peft = PeftModel.from_pretrained(model, paths[0], adapter_name=paths[0].name)
    for path in paths[1:]:
        peft.load_adapter(path, adapter_name=path.name)
    peft.set_adapter(paths[0].name)
    return peft.eval()


@torch.no_grad()
def generate(
    model: Any, prompts: list[list[int]], *, max_tokens: int, adapter_names: list[str] | None
) -> dict[str, float]:
    """Generate for one static batch; return its times in seconds."""
    clock = Clock()
    ids = torch.tensor(prompts)  # [num_seqs, num_tokens]
    mixed = {} if adapter_names is None else {"adapter_names": adapter_names}
    started_s = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
        **mixed,
    )
    wall_s = time.perf_counter() - started_s
    assert output.shape[1] == ids.shape[1] + max_tokens
    first_s, last_s = clock.times_s[0], clock.times_s[-1]
    return {
        "wall_s": wall_s,
        "ttft_s": first_s - started_s,
        "inter_token_s": (last_s - first_s) / (max_tokens - 1),
    }


def run_level(model: Any, level: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Run the batches of one level one after the other."""
    size, prompts, names = level["concurrency"], level["prompts"], level["adapter_names"]
    times = [
        generate(
            model,
            prompts[start : start + size],
            max_tokens=max_tokens,
            adapter_names=None if names is None else names[start : start + size],
        )
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
        "inter_token_p50_ms": round(
            1000 * statistics.median(one["inter_token_s"] for one in times), 1
        ),
    }


def main() -> None:
    """Run the plan: base levels on the plain model, the rest on a PeftModel."""
    plan = json.load(sys.stdin)
    started_s = time.perf_counter()
    model = load_base(Path(plan["gguf"]))
    print(json.dumps({"start_s": round(time.perf_counter() - started_s, 2)}), flush=True)
    generate(model, plan["levels"][0]["prompts"][:1], max_tokens=8, adapter_names=None)
    with_adapters = False
    for level in plan["levels"]:
        if level["workload"] != "base" and not with_adapters:
            model, with_adapters = load_adapters(model, plan["adapters"]), True
        print(json.dumps(run_level(model, level, plan["max_tokens"])), flush=True)


if __name__ == "__main__":
    main()
