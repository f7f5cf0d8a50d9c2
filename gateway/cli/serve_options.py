"""What `loraplex serve` and `loraplex worker` are told, checked before anything starts."""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from gateway.embedded.default_model import SERVED_NAME, find_default_model
from gateway.embedded.errors import ServeRefused
from gateway.embedded.machine import memory_share_bytes

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MIN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What each local worker's engine is told; None leaves the choice to the engine."""

    model: str
    served_model_name: str | None
    dtype: str
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_tokens_per_step: int
    block_size: int
    memory_bytes: int | None
    num_threads: int | None = None
    scheduling: str = "fair"
    attention: str = "auto"

    def as_config(
        self, *, state_dir: Path, worker_index: int = 0, num_workers: int = 1
    ) -> dict[str, Any]:
        """The fields of the engine's own configuration; several workers share cores and memory.

        Host memory is divided here. What a device has only an engine can see: it is told its place
        among the workers, and takes its share itself.
        """
        memory_bytes = memory_share_bytes(num_workers) if self.device == "cpu" else None
        share = (os.cpu_count() or 1) // num_workers
        return {
            "model": self.model,
            "state_dir": str(state_dir),
            "served_model_name": self.served_model_name,
            "dtype": self.dtype,
            "device": self.device,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_tokens_per_step": self.max_tokens_per_step,
            "block_size": self.block_size,
            "memory_bytes": self.memory_bytes or memory_bytes,
            "worker_index": worker_index,
            "num_workers": num_workers,
            "num_threads": self.num_threads or (None if num_workers == 1 else max(1, share)),
            "scheduling": self.scheduling,
            "attention": self.attention,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSource:
    """An adapter that is pushed at start. `promote`: the operator named it, so it is served."""

    name: str
    path: Path
    promote: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """One gateway with its local workers. `redis_url` None means a private Valkey."""

    engine: EngineOptions
    adapters: tuple[AdapterSource, ...]
    host: str
    port: int
    api_key: str | None
    admin_key: str | None
    cluster_token: str | None
    num_workers: int
    redis_url: str | None
    store_dir: Path | None
    state_dir: Path
    allowed_roots: tuple[Path, ...]


def resolve_model(model: str | None, served_model_name: str | None) -> tuple[str, str | None]:
    """The model to load and its public name; raises ServeRefused for one that isn't there."""
    if model is None:
        return str(find_default_model()), served_model_name or SERVED_NAME
    path = Path(model).expanduser()
    if path.exists():
        return str(path.resolve()), served_model_name
    if re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", model) and path.suffix != ".gguf":
        return model, served_model_name
    raise ServeRefused(
        f"no such model: {model}; give a local directory or .gguf file, a hub id like "
        "HuggingFaceTB/SmolLM2-135M-Instruct, or nothing for the default base"
    )


def parse_memory(text: str | None) -> int | None:
    """Bytes of "2GiB", "512M" or "1073741824"; None stays None. Raises typer.BadParameter."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} isn't a size; write it like 2GiB or 512MiB")
    num_bytes = int(float(found[1]) * UNITS[found[2].upper()])
    if num_bytes < MIN_MEMORY_BYTES:
        raise typer.BadParameter(f"{text!r} is under the least that is useful, 64MiB")
    return num_bytes


def parse_adapters(texts: list[str]) -> tuple[AdapterSource, ...]:
    """The adapters of `--adapter NAME=PATH`; raises typer.BadParameter or ServeRefused."""
    sources = []
    for text in texts:
        name, separator, path = text.partition("=")
        if not (separator and name and path):
            raise typer.BadParameter(f"{text!r} isn't NAME=PATH")
        if not Path(path).expanduser().exists():
            raise ServeRefused(f"there's no adapter at {path} (--adapter {text})")
        sources.append(
            AdapterSource(name=name, path=Path(path).expanduser().resolve(), promote=True)
        )
    return tuple(sources)


def find_demo_adapters() -> tuple[AdapterSource, ...]:
    """The adapters under examples/adapters of the current folder or of this checkout."""
    checkout = Path(__file__).parents[2]
    for root in dict.fromkeys((Path.cwd(), checkout)):
        found = sorted((root / "examples" / "adapters").glob("*/adapter_config.json"))
        if found:
            return tuple(
                AdapterSource(name=config.parent.name, path=config.parent, promote=False)
                for config in found
                if (config.parent / "adapter_model.safetensors").is_file()
            )
    return ()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_host(options: ServeOptions) -> None:
    """Raise ServeRefused if strangers could call a server that asks for no key."""
    if is_loopback(options.host) or options.api_key or options.admin_key:
        return
    raise ServeRefused(
        f"--host {options.host} can be reached from other machines, so keys are needed: set "
        "--api-key and --admin-key (or LORAPLEX_API_KEY and LORAPLEX_ADMIN_KEY), or bind 127.0.0.1"
    )
