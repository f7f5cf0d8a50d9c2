"""Whatever a stranger uploads is refused in words, and nobody else notices."""

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import load, save

from tests.end_to_end.hostile import configs, tars, weights, wire, zips
from tests.end_to_end.hostile.bystanders import NUM_STREAMS, Bystanders
from tests.end_to_end.hostile.case import CONFIG, WEIGHTS, Case, Ground, Reply
from tests.end_to_end.peft_reference import save_random_adapter, save_tiny_llama
from tests.end_to_end.serving import Serving, serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow
CASES = [*tars.CASES, *zips.CASES, *weights.CASES, *configs.CASES, *wire.CASES]
NUM_SENDERS = 4
MAX_ANSWER_BYTES = 64 << 10
EVIL = ("evil-climber", "evil-absolute", "evil-through", "evil")


class Siege:
    """A real server under all the uploads at once, with bystanders, and what was there before."""

    def __init__(self, server: Serving, ground: Ground, state: Path, streams: Bystanders) -> None:
        self.server = server
        self.ground = ground
        self.state = state
        self.streams = streams
        self.before = self.look()
        self._senders = ThreadPoolExecutor(NUM_SENDERS)
        self._replies: dict[str, Future[Reply]] = {
            case.id: self._senders.submit(case.send, ground) for case in CASES
        }

    def reply(self, case: Case) -> Reply:
        return self._replies[case.id].result(timeout=60)

    def look(self) -> dict[str, object]:
        """Return all that an upload could have changed."""
        with self.server.client() as http:
            shown = http.get("/v1/adapters").json()
        with redis.Redis.from_url(self.server.ready["redis_url"]) as registry:
            kept = {
                key: registry.hgetall(f"{{lp}}:{key}") for key in ("adapters", "manifests", "bases")
            }
            num_changes = registry.xlen("{lp}:audit")
        return {
            "api": shown,
            "registry": kept,
            "changes": num_changes,
            "store": digests(self.state / "store"),
            "outside": digests(self.ground.outside),
            "state": sorted(p.name for p in self.state.iterdir()),
        }

    def close(self) -> None:
        self._senders.shutdown(cancel_futures=True)


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    home = tmp_path_factory.mktemp("siege")
    save_tiny_llama(home / "base")
    targets = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}
    for seed, name in enumerate(("one", "two", "sound")):
        save_random_adapter(home / "base", home / name, seed=seed, **targets)
    for folder in ("root", "outside"):
        (home / folder).mkdir()
    for file in (CONFIG, WEIGHTS):
        (home / "outside" / file).write_bytes((home / "sound" / file).read_bytes())
    (home / "linked-root").symlink_to(home / "root")
    arguments = [
        str(home / "base"),
        *("--dtype", "fp32", "--memory", "256MiB", "--num-threads", "1"),
        *("--served-model-name", "tiny"),
        *("--allowed-root", str(home / "linked-root")),
        *(f"--adapter={name}={home / name}" for name in ("one", "two")),
    ]
    with serving(*arguments, state_dir=home / "state", log=home / "serve.log") as server:
        ground = Ground(
            url=server.url,
            config=(home / "sound" / CONFIG).read_bytes(),
            weights=(home / "sound" / WEIGHTS).read_bytes(),
            root=home / "root",
            outside=home / "outside",
        )
        with Bystanders(server.url, ["tiny", "tiny:one", "tiny:two"]) as streams:
            running = Siege(server, ground, home / "state", streams)
            yield running
            running.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_hostile_upload_is_refused_in_words(siege: Siege, case: Case) -> None:
    reply = siege.reply(case)

    assert reply.status == case.status, reply.text[:2000]
    assert case.words.lower() in reply.text.lower()
    assert len(reply.text) <= MAX_ANSWER_BYTES
    for secret in (
        str(siege.state.parent),
        "Traceback",
        'File "',
        "site-packages",
        str(Path.cwd()),
    ):
        assert secret not in reply.text
    if reply.text.startswith("{"):
        check_words(json.loads(reply.text)["error"])


def check_words(error: dict) -> None:
    """Each problem is a sentence that a person can read."""
    texts = [error["message"], *error.get("problems", [])]
    assert error["code"]
    assert error["message"].isprintable()
    for text in texts:
        assert len(re.findall(r"\w+", text)) >= 4 or re.fullmatch(r"and \d+ more", text), text


def test_cases_are_many_and_each_has_its_name() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= 60


def test_bystanders_streamed_all_the_while_and_noticed_nothing(siege: Siege) -> None:
    for case in CASES:
        siege.reply(case)

    assert siege.streams.mismatches == []
    assert siege.streams.num_finished >= NUM_STREAMS


def test_nothing_was_stored_and_nothing_lies_about(siege: Siege) -> None:
    for case in CASES:
        siege.reply(case)

    assert siege.look() == siege.before
    assert list((siege.state / "store" / "staging").iterdir()) == []
    for name in EVIL:
        assert not list(siege.state.parent.rglob(name))
        assert not Path("/tmp", name).exists()


@pytest.mark.parametrize("value", [1e38, -3e38, 1e20])
def test_weights_that_overflow_harm_nobody(siege: Siege, value: float) -> None:
    """They are finite numbers of the right shape, so that only a probe can tell."""
    arrays = {
        name: np.full_like(array, value) for name, array in load(siege.ground.weights).items()
    }
    files = siege.ground.files | {WEIGHTS: save(arrays)}
    num_before = siege.streams.num_finished

    reply = siege.ground.post_files(files, name=f"giant{abs(value):.0e}".replace("+", ""))

    assert reply.status == 422, reply.text
    eventually(lambda: siege.streams.num_finished > num_before + NUM_STREAMS)
    assert siege.streams.mismatches == []


def test_a_sound_upload_is_taken_afterwards(siege: Siege) -> None:
    """The server isn't only alive: the same files, unspoilt, are an adapter."""
    for case in CASES:
        siege.reply(case)

    reply = siege.ground.post_files(siege.ground.files, name="sound")

    assert reply.status == 201, reply.text
