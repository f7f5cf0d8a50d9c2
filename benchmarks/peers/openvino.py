"""OpenVINO GenAI: its continuous batching, offline, in a process of its own environment."""

from pathlib import Path
from typing import ClassVar

from peers.peer import BatchPeer, missing_venv, venv_python

VENV = "openvino"
SCRIPT = Path(__file__).resolve().with_name("openvino_batches.py")
WRONG = "in a mixed batch every row gets the first request's adapter"


class OpenVino(BatchPeer):
    """The base and one adapter only; its mixed batches are wrong without a word."""

    key = "openvino"
    title = "OpenVINO GenAI, in process"
    cannot: ClassVar[dict[str, str]] = {
        "all distinct": WRONG,
        "zipf": WRONG,
        "prefix": "only short prompts are asked of it",
        "prefix, one adapter": "only short prompts are asked of it",
        "cold adapters": "it is no server",
    }

    @classmethod
    def missing(cls) -> str | None:
        return missing_venv(VENV)

    @classmethod
    def command(cls) -> list[str]:
        return [str(venv_python(VENV)), str(SCRIPT)]
