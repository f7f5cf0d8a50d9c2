"""No upload is beyond words: mutations of real configs and headers, seeded, by the thousand."""

import json
import random
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from adapters.digest import adapter_digest
from adapters.peft_config import read_config
from adapters.safetensors_header import read_header
from adapters.validate import Inspection, inspect_directory
from tests.adapters.fuzz import mutated_config, mutated_weights
from tests.adapters.worlds import config, safetensors_bytes, tensors, tiny_base

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CORPUS = Path(__file__).parents[1] / "data" / "adapter_configs"
CONFIGS = [path.read_bytes() for path in sorted(CORPUS.glob("*.json"))]
SOUND_CONFIG = json.dumps(config()).encode()
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SOUND_WEIGHTS = [
    safetensors_bytes(tensors()),
    safetensors_bytes(tensors(ALL_TARGETS, rank=2)),
    safetensors_bytes(tensors(root="")),
    safetensors_bytes({name: array.astype(np.float16) for name, array in tensors().items()}, "F16"),
]
# Of computing, beside the second that an expression may take in a process of its own.
MAX_CASE_S = 1.0
MAX_GROWTH_BYTES = 256 << 20
MAX_TEXT_CHARS = 2000


@dataclass
class Tally:
    """What came of the cases: both ends must have been reached for the search to mean a thing."""

    num_accepted: int = 0
    num_refused: int = 0
    slowest_s: float = 0
    texts: set[str] = field(default_factory=set)

    def check(self, inspection: Inspection) -> None:
        """Hold an inspection to what it promises."""
        if inspection.adapter is None:
            assert inspection.problems
            self.num_refused += 1
        else:
            assert not inspection.problems
            assert adapter_digest(inspection.adapter).startswith("sha256:")
            self.num_accepted += 1
        for text in (*inspection.problems, *inspection.notes, *inspection.warnings):
            assert 0 < len(text) <= MAX_TEXT_CHARS
            assert text.isprintable()
            self.texts.add(text[:40])


def search(folder: Path, *, num_cases: int, seed: int) -> Tally:
    """Inspect so many mutated folders; each even one has a sound half."""
    tally = Tally()
    rng = random.Random(seed)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    base = tiny_base()
    for number in range(num_cases):
        raw_config, raw_weights = SOUND_CONFIG, rng.choice(SOUND_WEIGHTS)
        if number % 2:
            start = rng.choice([SOUND_CONFIG, *CONFIGS])
            raw_config = mutated_config(start, rng, others=CONFIGS)
        if number % 4 != 1:
            raw_weights = mutated_weights(raw_weights, rng)
        (folder / CONFIG).write_bytes(raw_config)
        (folder / WEIGHTS).write_bytes(raw_weights)
        started = time.thread_time()
        try:
            read_config(raw_config)
            read_header(folder / WEIGHTS)
            tally.check(inspect_directory(folder, base))
        except Exception as error:
            error.add_note(f"case {number} of seed {seed}: {raw_config[:400]!r}")
            raise
        tally.slowest_s = max(tally.slowest_s, time.thread_time() - started)
    assert tally.slowest_s < MAX_CASE_S
    memory_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert memory_after - memory_before < MAX_GROWTH_BYTES
    return tally


def test_three_hundred_mutated_uploads_are_applied_or_refused_in_words(tmp_path: Path) -> None:
    tally = search(tmp_path, num_cases=300, seed=20)

    assert tally.num_accepted > 0
    assert tally.num_refused > 150
    assert len(tally.texts) > 30


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_twenty_thousand_mutated_uploads_are_applied_or_refused_in_words(
    tmp_path: Path, seed: int
) -> None:
    tally = search(tmp_path, num_cases=2500, seed=seed)

    assert tally.num_accepted > 10
    assert tally.num_refused > 1000
