"""Prometheus metrics of one worker: ours, and those that routers read of vLLM's."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import CoreStatus
from engine.server.generation import Generation
from engine.server.identifiers import unix_time_s

_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_COUNTERS = {
    "steps": ("num_steps", "Steps of the engine."),
    "tokens_computed": ("num_tokens_computed", "Tokens whose K and V were computed."),
    "tokens_generated": ("num_tokens_generated", "Tokens sampled."),
    "mixed_adapter_steps": (
        "num_steps_with_several_adapters",
        "Steps in which several adapters shared the batch.",
    ),
    "adapter_loads": ("num_adapter_loads", "Copies of a version into the arena."),
    "adapter_evictions": ("num_adapter_evictions", "Versions that made room in the arena."),
    "preemptions": ("num_preemptions", "Sequences that gave their blocks back and wait again."),
    "cached_tokens": ("num_cached_tokens", "Prompt tokens that had been computed earlier."),
}


class Metrics:
    """Counts what the server sees, and shows the core's own numbers as of now."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "loraplex_requests",
            "Generation requests by how they ended.",
            ("endpoint", "outcome"),
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "loraplex_prompt_tokens", "Tokens of prompts.", registry=self._registry
        )
        self._generation_tokens = Counter(
            "loraplex_generation_tokens", "Tokens of answers.", registry=self._registry
        )
        self._ttft = Histogram(
            "loraplex_time_to_first_token_seconds",
            "From the parsed request to its first token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )

    def count(self, generation: Generation, *, endpoint: str, began_s: float) -> None:
        """Take the end of a request; `began_s` on the monotonic clock."""
        done = all(choice.finish_reason is not None for choice in generation.choices)
        usage = generation.usage()
        self._requests.labels(endpoint, "finished" if done else "cut_short").inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        if generation.first_at_s is not None:
            self._ttft.observe(generation.first_at_s - began_s)

    def expose(
        self, status: CoreStatus | None, *, model_name: str, num_core_starts: int, max_num_seqs: int
    ) -> bytes:
        """All metrics as text; without the core's when `status` is None."""
        now = CollectorRegistry()
        now.register(_Snapshot(_core_metrics(status, num_core_starts=num_core_starts)))
        if status is not None:
            vllm = _vllm_metrics(status, model_name=model_name, max_num_seqs=max_num_seqs)
            now.register(_Snapshot(vllm))
        return generate_latest(self._registry) + generate_latest(now)


class _Snapshot(Collector):
    def __init__(self, metrics: Iterator[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _core_metrics(status: CoreStatus | None, *, num_core_starts: int) -> Iterator[Metric]:
    yield _gauge("loraplex_core_up", "1 while an engine core serves.", 0 if status is None else 1)
    starts = "Starts of the engine core's process."
    yield CounterMetricFamily("loraplex_core_starts", starts, value=num_core_starts)
    if status is None:
        return
    for name, (attribute, text) in _COUNTERS.items():
        value = getattr(status, attribute)
        yield CounterMetricFamily(f"loraplex_{name}", text, value=value)
    yield _gauge("loraplex_running_sequences", "In the batch.", status.num_running_seqs)
    yield _gauge("loraplex_waiting_sequences", "Queued.", status.num_waiting_seqs)
    yield _gauge("loraplex_kv_blocks", "KV blocks in all.", status.num_blocks)
    yield _gauge("loraplex_free_kv_blocks", "KV blocks that are free.", status.num_free_blocks)
    cached = "KV blocks that a later prompt can find."
    yield _gauge("loraplex_cached_kv_blocks", cached, status.num_cached_blocks)
    yield from _arena_metrics(status)


def _arena_metrics(status: CoreStatus) -> Iterator[Metric]:
    rows = GaugeMetricFamily("loraplex_arena_rows", "Rank rows.", labels=("group",))
    free = GaugeMetricFamily("loraplex_free_arena_rows", "Free rank rows.", labels=("group",))
    for group, num_rows in status.lora_rows.items():
        rows.add_metric((group,), num_rows)
        free.add_metric((group,), status.free_lora_rows.get(group, 0))
    counts: dict[str, int] = {}
    resident = GaugeMetricFamily(
        "loraplex_resident_adapter",
        "Versions in the arena now: 1 each.",
        labels=("lora_id", "tier", "rank", "pinned"),
    )
    for adapter in status.adapters:
        counts[adapter.state] = counts.get(adapter.state, 0) + 1
        if adapter.state == "resident":
            pinned = str(adapter.pinned).lower()
            labels = (adapter.lora_id, adapter.tier, str(adapter.max_rank), pinned)
            resident.add_metric(labels, 1)
    states = GaugeMetricFamily("loraplex_adapters", "Versions by state.", labels=("state",))
    for state, count in sorted(counts.items()):
        states.add_metric((state,), count)
    yield from (rows, free, resident, states)


def _vllm_metrics(status: CoreStatus, *, model_name: str, max_num_seqs: int) -> Iterator[Metric]:
    """The family that routers read, under vLLM's names.

    There is no limit of adapters; max_lora is how many a full batch can have.
    """
    used = 1 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0.0
    for name, text, value in (
        ("num_requests_running", "In the batch.", status.num_running_seqs),
        ("num_requests_waiting", "Queued.", status.num_waiting_seqs),
        ("gpu_cache_usage_perc", "KV blocks in use; 1 is all.", used),
        ("kv_cache_usage_perc", "KV blocks in use; 1 is all.", used),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name",))
        gauge.add_metric((model_name,), value)
        yield gauge
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests; the value is the time.",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    running, waiting = ",".join(status.running_lora_ids), ",".join(status.waiting_lora_ids)
    info.add_metric((str(max_num_seqs), running, waiting), unix_time_s())
    yield info


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
