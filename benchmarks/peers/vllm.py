"""vLLM's CPU build, plain and with the preloads that its documentation recommends."""

import math
from pathlib import Path

import httpx

from peers.peer import BASE, Adapter, first_reason, missing_venv, venv_python
from peers.server import ServerPeer

VENV = "vllm"
KV_BYTES_PER_TOKEN = 23_040  # of the default model in bf16
TCMALLOC_PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
TCMALLOC = "libtcmalloc_minimal.so.4"


class Vllm(ServerPeer):
    """vLLM's OpenAI server with LoRA on."""

    key = "vllm"
    title = "vLLM, plain"

    @classmethod
    def missing(cls) -> str | None:
        return missing_venv(VENV)

    def command(self, port: int) -> list[str]:
        setup = self.setup
        modules = [f"{adapter.name}={adapter.folder}" for adapter in setup.adapters]
        return [
            *(str(venv_python(VENV)), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(setup.model_dir), "--served-model-name", BASE),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16"),
            *("--max-num-seqs", str(setup.max_num_seqs)),
            *("--max-model-len", str(setup.max_model_len)),
            "--enable-lora",
            *("--max-loras", str(min(len(modules), setup.max_num_seqs))),
            *("--max-cpu-loras", str(max(len(modules), setup.max_num_seqs))),
            *("--max-lora-rank", str(_allowed_rank(setup.max_lora_rank))),
            "--disable-uvicorn-access-log",
            *("--lora-modules", *modules),
        ]

    def environment(self) -> dict[str, str]:
        needed_gib = self.setup.num_kv_tokens * KV_BYTES_PER_TOKEN / 2**30
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(needed_gib)),  # whole GiB only
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.setup.num_threads - 1}",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def load(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        answer = httpx.post(
            f"{self.url}/v1/load_lora_adapter", json=body, timeout=300, trust_env=False
        )
        if answer.is_error:
            raise RuntimeError(f"{adapter.name} was refused: {answer.text[:500]}")


class VllmWithPreloads(Vllm):
    """The same with tcmalloc and Intel's OpenMP runtime preloaded."""

    key = "vllm-preload"
    title = "vLLM, with preloads"

    @classmethod
    def missing(cls) -> str | None:
        return first_reason(super().missing, _missing_preload)

    def environment(self) -> dict[str, str]:
        libraries = [path for path in (_tcmalloc(), _intel_openmp()) if path is not None]
        preload = ":".join(str(path) for path in libraries)
        return super().environment() | {"LD_PRELOAD": preload}


def _allowed_rank(lora_rank: int) -> int:
    """vLLM takes only some ranks as its largest."""
    return next(size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= lora_rank)


def _tcmalloc() -> Path | None:
    places = (Path(place) / TCMALLOC for place in TCMALLOC_PLACES)
    return next((path for path in places if path.exists()), None)


def _intel_openmp() -> Path | None:
    path = venv_python(VENV).parents[1] / "lib" / "libiomp5.so"
    return path if path.exists() else None


def _missing_preload() -> str | None:
    if _tcmalloc() is None:
        return f"{TCMALLOC} isn't there (apt-get install libtcmalloc-minimal4)"
    return "its environment has no libiomp5.so" if _intel_openmp() is None else None
