"""Counters and gauges of one gateway, in a registry of its own; every label is bounded."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """What this gateway counts. Labels: route templates, methods, statuses and fixed words."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "loraplex_requests",
            "Answered requests.",
            ("route", "method", "status"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "loraplex_request_seconds",
            "Time to the last byte of an answer.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft_seconds = Histogram(
            "loraplex_time_to_first_token_seconds",
            "Time from the request to the first byte of an answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.tokens = Counter(
            "loraplex_tokens", "Tokens as workers counted them.", ("kind",), registry=registry
        )
        self.streams_broken = Counter(
            "loraplex_streams_broken",
            "Streams that a worker left unfinished.",
            registry=registry,
        )
        self.retries = Counter(
            "loraplex_retries",
            "Requests sent once more before their first byte.",
            ("reason",),
            registry=registry,
        )
        self.registry_reads = Counter(
            "loraplex_registry_reads",
            "Where a request's names were read from.",
            ("source",),
            registry=registry,
        )
        self.in_flight = Gauge(
            "loraplex_requests_in_flight", "Requests at workers now.", registry=registry
        )
        self.workers = Gauge("loraplex_workers", "Workers that are there.", registry=registry)
        self.worker_load = Gauge(
            "loraplex_worker_requests",
            "Requests at all workers, as they say.",
            ("state",),
            registry=registry,
        )

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)

    def count_usage(self, usage: dict[str, object]) -> None:
        """Count the tokens of one answer's usage."""
        for kind in ("prompt", "completion"):
            num_tokens = usage.get(f"{kind}_tokens")
            if isinstance(num_tokens, int):
                self.tokens.labels(kind).inc(num_tokens)
