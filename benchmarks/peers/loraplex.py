"""Loraplex itself: gateway, registry, worker server and core, as `loraplex serve` starts them."""

import json
from typing import Any

import httpx
from harness import Call
from processes import LORAPLEX

from peers.peer import BASE, PEERS_DIR, Adapter
from peers.server import ServerPeer

STATE_DIR = PEERS_DIR / "state"
KV_BYTES_PER_TOKEN = 23_040  # of the default model in bf16
ROW_BYTES = 611_000  # of one rank row over all modules of all layers
LORA_SLACK = 1.25  # the arena keeps some rows for the embedding and the head
ACTIVATION_BYTES = 64 << 20


class Loraplex(ServerPeer):
    """Through the gateway; `worker_url` is the worker's own server, for what the gateway adds."""

    key = "loraplex"
    title = "Loraplex"

    @classmethod
    def missing(cls) -> str | None:
        return None if LORAPLEX.exists() else "the command loraplex isn't in this environment"

    @classmethod
    def workloads(cls, wanted: tuple[str, ...]) -> tuple[str, ...]:
        return wanted

    def command(self, port: int) -> list[str]:
        setup = self.setup
        lora_rows = sum(adapter.lora_rank for adapter in setup.adapters)
        num_bytes = (
            setup.num_kv_tokens * KV_BYTES_PER_TOKEN
            + int(lora_rows * ROW_BYTES * LORA_SLACK)
            + ACTIVATION_BYTES
        )
        return [
            *(str(LORAPLEX), "serve", str(setup.gguf), "--json"),
            *("--port", str(port)),
            *("--state-dir", str(STATE_DIR)),
            *("--served-model-name", BASE),
            *("--dtype", "bf16"),
            *("--num-threads", str(setup.num_threads)),
            *("--max-num-seqs", str(setup.max_num_seqs)),
            *("--max-model-len", str(setup.max_model_len)),
            *("--memory", f"{num_bytes >> 20}MiB"),
        ]

    def is_ready(self) -> bool:
        return any(event["event"] == "ready" for event in self._events())

    @property
    def worker_url(self) -> str:
        """Where the only worker listens."""
        workers = [event for event in self._events() if event["event"] == "worker"]
        return str(workers[-1]["details"]["address"])

    def call(self, prompt_ids: list[int], adapter: Adapter | None) -> Call:
        model = BASE if adapter is None else f"{BASE}:{adapter.name}"
        return Call(model=model, prompt_ids=prompt_ids)

    def load(self, adapter: Adapter) -> None:
        files = [("files", (path.name, path.read_bytes())) for path in adapter.folder.iterdir()]
        form = {"name": adapter.name}
        answer = httpx.post(
            f"{self.url}/v1/adapters", data=form, files=files, timeout=300, trust_env=False
        )
        if answer.is_error:
            raise RuntimeError(f"{adapter.name} was refused: {answer.text[:500]}")

    def prepare(self) -> None:
        for adapter in self.setup.adapters:
            self.load(adapter)

    def _events(self) -> list[dict[str, Any]]:
        lines = self.setup.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
