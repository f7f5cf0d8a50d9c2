"""What compare.py asks of every system, whether it is a server or runs in a process of ours."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[2]
PEERS_DIR = ROOT / ".peers"
BASE = "base"  # what every server calls the base model
ADAPTER_PREFIX = "adapter-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A PEFT folder on disk; `name` is what servers call it."""

    name: str
    folder: Path
    lora_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a system is started for.

    adapters       all of them are loaded before anything is measured
    num_kv_tokens  room in the KV cache, over all sequences
    """

    gguf: Path
    model_dir: Path
    adapters: tuple[Adapter, ...]
    num_kv_tokens: int
    max_model_len: int
    max_num_seqs: int
    num_threads: int
    log: Path

    @property
    def max_lora_rank(self) -> int:
        return max(adapter.lora_rank for adapter in self.adapters)


class Peer(ABC):
    """A system, not yet started.

    cannot   workloads it is not asked for, each with the reason
    """

    key: ClassVar[str]
    title: ClassVar[str]
    cannot: ClassVar[dict[str, str]] = {}

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why it can't run here, in words; None if it can."""

    @classmethod  # noqa: B027  most read the files as they are
    def make_files(cls, setup: Setup) -> None:
        """Write the model and the adapters in its own format, if it has one; not measured."""

    @classmethod
    def workloads(cls, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """The wanted ones that it can do; only Loraplex has a gateway to go past."""
        return tuple(name for name in wanted if name != "gateway" and name not in cls.cannot)


class BatchPeer(Peer):
    """A system without a server: a script that takes a plan and writes a line for each level."""

    @classmethod
    @abstractmethod
    def command(cls) -> list[str]:
        """The script, which reads a plan as JSON on stdin."""

    @classmethod
    def plan(cls, setup: Setup, levels: list[dict[str, Any]], *, max_tokens: int) -> dict[str, Any]:
        """What the script is told."""
        return {
            "gguf": str(setup.gguf),
            "model_dir": str(setup.model_dir),
            "adapters": [str(adapter.folder) for adapter in setup.adapters],
            "num_kv_tokens": setup.num_kv_tokens,
            "num_threads": setup.num_threads,
            "max_tokens": max_tokens,
            "levels": levels,
        }


def venv_python(name: str) -> Path:
    """The interpreter of a peer's own environment, whether or not it is there."""
    return PEERS_DIR / name / "bin" / "python"


def ready_mark(name: str) -> Path:
    """A file that is there once a peer's environment is complete."""
    return PEERS_DIR / name / ".ready"


def missing_venv(name: str) -> str | None:
    """Why a peer's environment can't be used."""
    if ready_mark(name).exists():
        return None
    return f"its environment .peers/{name} isn't there (make bench-peers)"


def first_reason(*checks: Callable[[], str | None]) -> str | None:
    """The first reason that one of the checks gives."""
    return next((reason for check in checks if (reason := check()) is not None), None)
