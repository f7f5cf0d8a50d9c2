"""OpenVINO GenAI: its continuous batching, offline, in a process of its own environment."""

import subprocess
from pathlib import Path
from typing import ClassVar

from peers.peer import BatchPeer, Setup, missing_venv, venv_python

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
    def make_files(cls, setup: Setup) -> None:
        with setup.log.open("w") as log:
            subprocess.run(
                [*cls.command(), str(setup.model_dir)], check=True, stdout=log, stderr=log
            )

    @classmethod
    def command(cls) -> list[str]:
        # -P: or this folder would hide the packages that its files are named after.
        return [str(venv_python(VENV)), "-P", str(SCRIPT)]
