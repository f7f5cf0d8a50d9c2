"""transformers + PEFT: static batches in one process, in this environment."""

import sys
from pathlib import Path
from typing import ClassVar

from peers.peer import BatchPeer

SCRIPT = Path(__file__).resolve().parents[1] / "peft_baseline.py"
TOO_SLOW = "left out to keep the run short"


class Peft(BatchPeer):
    """`adapter_names` for mixed batches; one active adapter where all requests share it."""

    key = "peft"
    title = "transformers + PEFT, in process"
    cannot: ClassVar[dict[str, str]] = {
        "zipf": TOO_SLOW,
        "prefix": "it keeps no prefixes",
        "prefix, one adapter": "it keeps no prefixes",
        "cold adapters": "it is no server",
    }

    @classmethod
    def missing(cls) -> str | None:
        return None

    @classmethod
    def command(cls) -> list[str]:
        return [sys.executable, str(SCRIPT)]
