"""Where does a step's time go? Decode steps and prefill chunks beside their products alone.

`python benchmarks/decode_step.py`; two minutes on an idle machine. The default model in bf16; in
decode steps every sequence is at a context of 160 tokens in shuffled blocks, a prefill chunk is the
first of its prompt; no sampling, no HTTP. "distinct" gives each sequence its own rank-16 adapter of
all linear modules.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from one_openmp import STATE_DIR, start_as_a_core
from provenance import describe_run
from readme_section import replace_section
from report import describe

from engine.assembly import module_specs
from engine.config import EngineConfig
from engine.kvcache.storage import KVStorage
from engine.model.decoder import Decoder
from engine.model.loading import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.model.warm_up import warm_up
from engine.protocol import SamplingParams
from engine.scheduler.plan import Chunk, StepPlan
from engine.sequence import Sequence
from gateway.embedded.default_model import find_default_model
from punica_kernels.arena import Arena, ModuleSpec, Span

BATCHES = (1, 8, 32)
PREFILLS = (128, 512)  # tokens of a chunk
PREFILL_REPEATS = 8
CONTEXT = 160
BLOCK_SIZE = 16
LORA_RANK = 16
CPU = torch.device("cpu")
HERE = Path(__file__).resolve().parent


def main() -> None:
    start_as_a_core()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="*", default=["auto", "torch"])
    parser.add_argument("--repeats", type=int, default=40, help="steps of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--update-readme", action="store_true", help="put the table in README.md")
    arguments = parser.parse_args()
    now = datetime.now(UTC)
    result = describe_run(now, libraries=("torch", "numba"))
    result["steps"] = []
    for kernels in arguments.kernels:
        bench = Bench(kernels)
        for batch in BATCHES:
            chunks = [(CONTEXT - 1, 1)] * batch
            step = bench.measure(chunks, repeats=arguments.repeats, rounds=arguments.rounds)
            result["steps"].append({"batch": batch} | step)
            print(json.dumps(result["steps"][-1]), flush=True)
        for num_tokens in PREFILLS:
            chunks = [(0, num_tokens)]
            step = bench.measure(chunks, repeats=PREFILL_REPEATS, rounds=arguments.rounds)
            result["steps"].append({"prefill": num_tokens} | step)
            print(json.dumps(result["steps"][-1]), flush=True)
    table = f"{describe(result)}\n\n{table_of(result['steps'])}"
    print(table)
    if arguments.update_readme:
        replace_section("decode_step", table)
    path = HERE / "results" / f"decode_step-{now:%Y-%m-%dT%H%M}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


class Bench:
    """A decoder with KV and an arena of as many adapters as the largest batch."""

    def __init__(self, kernels: str) -> None:
        config = EngineConfig(
            model=str(find_default_model()), state_dir=str(STATE_DIR), dtype="bf16", kernels=kernels
        )
        self._loaded = load_model(config, progress=print)
        self._decoder: Decoder = self._loaded.decoder
        modules = [one for one in module_specs(self._loaded) if one.num_layers is None]
        if kernels != "torch":
            self._decoder.prepack()
            warm_up(self._decoder, modules, block_size=BLOCK_SIZE, progress=print)
        self._num_blocks = max(BATCHES) * -(-CONTEXT // BLOCK_SIZE)
        kv = _kv(self._loaded, num_blocks=self._num_blocks)
        arena = _arena(self._loaded, modules)
        self._runner = ModelRunner(decoder=self._decoder, kv=kv, arena=arena)

    def measure(
        self, chunks: list[tuple[int, int]], *, repeats: int, rounds: int
    ) -> dict[str, Any]:
        """Return medians in ms of products alone, base and distinct steps, taking turns.

        chunks  tokens computed before, and now, of each sequence
        """
        base, distinct = self._plan(chunks, lora=False), self._plan(chunks, lora=True)
        num_tokens = sum(count for _, count in chunks)
        sides: dict[str, Callable[[], object]] = {
            "products_ms": lambda: self._products(num_tokens, num_logits=len(chunks)),
            "base_ms": lambda: self._runner.run(base),
            "distinct_ms": lambda: self._runner.run(distinct),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, run in sides.items():
                run()
                for _ in range(repeats):
                    began_s = time.perf_counter()
                    run()
                    times[name].append(1e3 * (time.perf_counter() - began_s))
        medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
        return {"kernels": self._decoder.kernels.name, **medians}

    @torch.inference_mode()
    def _products(self, num_tokens: int, *, num_logits: int) -> None:
        spec = self._decoder.spec
        hidden = torch.ones(num_tokens, spec.hidden, dtype=torch.bfloat16)
        q = torch.ones(num_tokens, spec.q_features, dtype=torch.bfloat16)
        inner = torch.ones(num_tokens, spec.intermediate, dtype=torch.bfloat16)
        for layer in self._decoder.layers:
            weights = layer.weights
            weights.qkv.product(hidden)
            weights.o.product(q)
            weights.gate_up.product(hidden)
            weights.down.product(inner)
        self._decoder.lm_head.product(hidden[:num_logits])

    def _plan(self, chunks: list[tuple[int, int]], *, lora: bool) -> StepPlan:
        rng = random.Random(0)
        block_ids = list(range(self._num_blocks))
        rng.shuffle(block_ids)
        made = []
        for index, (num_earlier, num_tokens) in enumerate(chunks):
            context = num_earlier + num_tokens
            table = [block_ids.pop() for _ in range(-(-context // BLOCK_SIZE))]
            sequence = Sequence(
                request_id=str(index),
                token_ids=[rng.randrange(1000) for _ in range(context)],
                num_prompt_tokens=context,
                params=SamplingParams(max_tokens=1),
                seed=0,
                eos_token_ids=(),
                block_table=table,
            )
            chunk = Chunk(
                sequence=sequence,
                start=num_earlier,
                num_tokens=num_tokens,
                samples=True,
                lora_index=index if lora else None,
            )
            made.append(chunk)
        return StepPlan(chunks=tuple(made))


def table_of(steps: list[dict[str, Any]]) -> str:
    """Return a line for each back end and batch or chunk."""
    lines = [
        "| kernels | step | products alone | base step | over products | distinct | over base |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in steps:
        products, base, distinct = one["products_ms"], one["base_ms"], one["distinct_ms"]
        what = f"prefill of {one['prefill']}" if "prefill" in one else f"decode, {one['batch']}"
        lines.append(
            f"| {one['kernels']} | {what} | {products:.1f} ms | {base:.1f} ms | "
            f"{base / products:.2f} | {distinct:.1f} ms | {distinct / base:.2f} |"
        )
    return "\n".join(lines)


def _kv(loaded: LoadedModel, *, num_blocks: int) -> KVStorage:
    kv = KVStorage(
        num_layers=loaded.spec.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=loaded.spec.num_kv_heads,
        head_dim=loaded.spec.head_dim,
        dtype=loaded.dtype,
        device=CPU,
    )
    kv.k.normal_(std=0.5)
    kv.v.normal_(std=0.5)
    return kv


def _arena(loaded: LoadedModel, modules: list[ModuleSpec]) -> Arena:
    num_adapters, num_layers = max(BATCHES), loaded.spec.num_layers
    arena = Arena(
        modules=modules,
        num_layers=num_layers,
        num_rows=dict.fromkeys({one.group for one in modules}, LORA_RANK * num_adapters),
        dtype=loaded.dtype,
        device=CPU,
    )
    for module in modules:
        arena.a(module.name).normal_(std=0.02)
        arena.b(module.name).normal_(std=0.02)
    ranks = {one.name: [[LORA_RANK] * one.num_slices] * num_layers for one in modules}
    scales = {one.name: [[1.0] * one.num_slices] * num_layers for one in modules}
    for index in range(num_adapters):
        span = Span(row0=LORA_RANK * index, num_rows=LORA_RANK)
        spans = dict.fromkeys(arena.num_rows, span)
        arena.set_adapter(index, spans=spans, ranks=ranks, scales=scales)
    return arena


if __name__ == "__main__":
    main()
