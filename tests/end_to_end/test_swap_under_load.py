"""New weights under an old name while streams run: a stream is of one version, and of which."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.end_to_end.grades import MAX_LOGIT_GAP
from tests.end_to_end.peft_reference import PeftReference, save_random_adapter, save_tiny_llama
from tests.end_to_end.serving import serving
from tests.end_to_end.token_streams import Streamed, greedy_body, stream_tokens, token_ids_of
from tests.waiting import eventually

pytestmark = pytest.mark.slow
BASE = "tiny"
NUM_STREAMS = 200
CONCURRENCY = 24
NUM_FLIPS = 10
NUM_TOKENS = 32
BLOCK_SIZE = 8
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
# Prompts that begin alike, a whole number of blocks and not, so that versions could share blocks
# if anything but their weights were asked for.
BEGINNING = [random.Random(0).randrange(3, 512) for _ in range(3 * BLOCK_SIZE)]
PROMPTS = [[*BEGINNING, *range(10, 10 + number)] for number in (0, 1, 5, 8, 21, 40)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The reference is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the tiny base and two adapters."""
    root = tmp_path_factory.mktemp("swap")
    save_tiny_llama(root / "base")
    for seed, name in enumerate("ab"):
        save_random_adapter(root / "base", root / name, seed=seed, **LORA)
    return root


@pytest.fixture(scope="module")
def server(world):
    with serving(
        str(world / "base"),
        f"--served-model-name={BASE}",
        *("--dtype=fp32", "--memory=128MiB", "--num-threads=1", "--max-model-len=256"),
        *(f"--max-num-seqs={2 * CONCURRENCY}", f"--block-size={BLOCK_SIZE}"),
        f"--allowed-root={world}",
        state_dir=world / "state",
        log=world / "serve.log",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def reference(world):
    base = LlamaForCausalLM.from_pretrained(world / "base", dtype=torch.float32)
    return PeftReference(base, {name: world / name for name in "ab"})


@pytest.fixture(scope="module")
def versions(world, server, reference):
    """Upload a and b as versions of one name; return what each must answer, by digest."""
    expected = {}
    with server.client() as http:
        for number, name in enumerate("ab", start=1):
            digest = push(http, "swap", world / name)
            expected[digest] = []
            for prompt in PROMPTS:
                body = greedy_body(f"{BASE}:swap@v{number}", prompt, max_tokens=NUM_TOKENS)
                answer = http.post("/v1/completions", json=body).raise_for_status()
                token_ids = token_ids_of(answer.json()["choices"][0]["text"])
                assert_greedy(reference, name, prompt, token_ids)
                expected[digest].append(token_ids)
    for one, other in zip(*expected.values(), strict=True):
        assert one[:2] != other[:2], "the versions must differ from the start"
    return expected


def push(http: httpx.Client, name: str, folder, *, promote: bool = False) -> str:
    """Upload a version; return its digest."""
    body = {"name": name, "path": str(folder), "promote": promote}
    answer = http.post("/v1/adapters", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()["digest"]


def assert_greedy(
    reference: PeftReference, name: str, prompt: list[int], token_ids: list[int]
) -> torch.Tensor:
    """Assert that PEFT would have said the same; return its log-probabilities of the tokens.

    One forward is enough: where each token is the most likely one after those before it, all
    together are the greedy answer.
    """
    logits = reference.logits(prompt + token_ids, name=name)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == token_ids, f"these aren't the tokens of {name}"
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]


@dataclass
class Flips:
    """Moves `default` back and forth, at moments counted in streamed tokens; knows what was when.

    targets  digests in the order in which `default` was moved to them; the first one is where it
             was at the beginning
    answers  the requests that were each the first after an acknowledgement
    """

    http: httpx.AsyncClient
    rng: random.Random
    targets: list[str]
    num_acknowledged: int = 0
    num_tokens: int = 0
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list["asyncio.Task[Streamed]"] = field(default_factory=list)

    def on_token(self) -> None:
        self.num_tokens += 1
        self.moved.set()

    async def run(self, digests: list[str], ask) -> None:
        """Flip until cancelled; after each acknowledgement the very next request is checked."""
        for digest in itertools.cycle(digests):
            threshold = self.num_tokens + self.rng.randrange(1, 3 * NUM_TOKENS)
            while self.num_tokens < threshold:
                self.moved.clear()
                await self.moved.wait()
            self.targets.append(digest)
            path = "/v1/adapters/swap/aliases/default"
            (await self.http.put(path, json={"version": digest})).raise_for_status()
            self.num_acknowledged += 1
            assert await self.version_of_next(ask) == digest

    async def version_of_next(self, ask) -> str:
        """Send a request now; return which version answers it as soon as that is known."""
        version: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        prompt = self.rng.randrange(len(PROMPTS))
        answer = asyncio.create_task(ask(prompt, on_headers=version.set_result))
        self.answers.append(answer)
        await asyncio.wait([version, answer], return_when=asyncio.FIRST_COMPLETED)
        return version.result() if version.done() else (await answer).version


@dataclass
class Load:
    """Streams against a moving `default`, each checked against what may have answered it."""

    http: httpx.AsyncClient
    flips: Flips
    expected: dict[str, list[list[int]]]
    num_streams: Counter = field(default_factory=Counter)
    num_across_a_flip: int = 0
    num_with_hits: Counter = field(default_factory=Counter)

    async def ask(
        self, prompt: int, *, on_headers: Callable[[str], None] = lambda _version: None
    ) -> Streamed:
        """Stream one answer; assert that it is wholly of one version, the one that it must be."""
        flips = self.flips
        first = flips.num_acknowledged
        possible: list[str] = []

        def note_possible(version: str) -> None:
            possible.extend(flips.targets[first:])
            on_headers(version)

        answer = await stream_tokens(
            self.http,
            model=f"{BASE}:swap",
            prompt_ids=PROMPTS[prompt],
            max_tokens=NUM_TOKENS,
            on_headers=note_possible,
            on_token=flips.on_token,
        )
        assert answer.version in possible, "neither the version before a flip nor the one after"
        wholly_of = [
            digest
            for digest, answers in self.expected.items()
            if answers[prompt] == answer.token_ids
        ]
        assert wholly_of == [answer.version], f"tokens of {wholly_of}, header {answer.version}"
        self.num_streams[answer.version] += 1
        self.num_with_hits[answer.version] += answer.num_cached_tokens > 0
        self.num_across_a_flip += len(flips.targets) - 1 > first
        return answer

    async def run(self, num_streams: int, *, concurrency: int, num_flips: int) -> None:
        """Go on until there were as many streams and flips; a busy machine needs more streams."""
        numbers = itertools.count()

        async def one_after_another() -> None:
            while (number := next(numbers)) < num_streams or (
                self.flips.num_acknowledged < num_flips and not flipping.done()
            ):
                await self.ask(number % len(PROMPTS))

        flipping = asyncio.create_task(self.flips.run(list(self.expected)[::-1], self.ask))
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_another())
        flipping.cancel()
        await asyncio.wait([flipping])
        if not flipping.cancelled():
            flipping.result()
        await asyncio.gather(*self.flips.answers)


def core_status(server) -> dict:
    with server.client() as http:
        return http.get("/v1/workers").raise_for_status().json()["data"][0]["status"]


def is_idle(status: dict) -> bool:
    """Whether nothing is held any more: no sequence, no block, no lease, no claim."""
    return (
        status["num_running_seqs"] == status["num_waiting_seqs"] == 0
        and status["num_free_blocks"] == status["num_blocks"]
        and all(one["num_leases"] == one["num_claims"] == 0 for one in status["adapters"])
    )


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.deep) for n in range(3, 50))]
)
def test_stream_is_wholly_of_the_version_that_it_names(server, versions, seed):
    """200 streams; whichever way `default` flips, no stream mixes, and none is of a stale one."""
    with server.client() as http:
        before = http.get("/v1/adapters/swap").json()["aliases"]["default"]["digest"]

    async def everything() -> tuple[Load, Flips]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=60, limits=limits, trust_env=False
        ) as http:
            flips = Flips(http=http, rng=random.Random(seed), targets=[before])
            load = Load(http=http, flips=flips, expected=versions)
            await load.run(NUM_STREAMS, concurrency=CONCURRENCY, num_flips=NUM_FLIPS)
        return load, flips

    load, flips = asyncio.run(everything())
    eventually(lambda: is_idle(core_status(server)))
    status = core_status(server)

    assert sum(load.num_streams.values()) >= NUM_STREAMS
    assert len(load.num_streams) == 2
    assert min(load.num_with_hits[digest] for digest in versions) > 0, "the cache was cold"
    assert flips.num_acknowledged >= NUM_FLIPS
    assert load.num_across_a_flip >= 20, "the streams have hardly met a flip"
    assert status["max_adapters_in_step"] == 2
    assert status["num_adapter_loads"] == 2, "a flip loads nothing"


@pytest.mark.parametrize("num_uploads", [12, pytest.param(100, marks=pytest.mark.deep)])
def test_new_weights_under_an_old_name_answer_as_if_nothing_were_cached(
    world, server, reference, num_uploads
):
    """Each upload moves `default`. The cache is warm with the same prompts, by older weights."""
    name = f"trained-{num_uploads}"
    asyncio.run(upload_again_and_again(world, server, reference, name, num_uploads))

    eventually(lambda: is_idle(core_status(server)))


async def upload_again_and_again(world, server, reference, name, num_uploads) -> None:
    before: str | None = None
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        for number in range(num_uploads):
            version = f"{name}-{number}"
            save_random_adapter(world / "base", world / version, seed=1000 + number, **LORA)
            reference.model.load_adapter(world / version, adapter_name=version)
            streaming = await begin_stream(http, name) if before is not None else None
            body = {"name": name, "path": str(world / version), "promote": True}
            pushed = await http.post("/v1/adapters", json=body)
            assert pushed.status_code == 201, pushed.text
            num_hits = [
                await check_answer(http, reference, name, version, prompt)
                for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[-1])
            ]
            assert num_hits[0] == 0, "no block of older weights is taken"
            assert min(num_hits[1:]) >= 2 * BLOCK_SIZE
            if streaming is not None:
                # A stream that was running stays what it was.
                assert_greedy(reference, before, PROMPTS[0], (await streaming).token_ids)
                reference.model.set_adapter(version)
                reference.model.delete_adapter(before)
            before = version


async def begin_stream(http, name) -> "asyncio.Task[Streamed]":
    """Start a stream and return it as soon as its first token has come."""
    has_begun = asyncio.Event()
    stream = asyncio.create_task(
        stream_tokens(
            http,
            model=f"{BASE}:{name}",
            prompt_ids=PROMPTS[0],
            max_tokens=NUM_TOKENS,
            on_token=has_begun.set,
        )
    )
    await asyncio.wait_for(has_begun.wait(), 30)
    return stream


async def check_answer(http, reference, name, version, prompt) -> int:
    """E1 against PEFT: every token, and each one's log-probability; return what was cached."""
    body = greedy_body(f"{BASE}:{name}", prompt, max_tokens=NUM_TOKENS) | {"logprobs": 0}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    (choice,) = answer["choices"]
    theirs = assert_greedy(reference, version, prompt, token_ids_of(choice["text"]))
    ours = torch.tensor(choice["logprobs"]["token_logprobs"])
    assert float((ours - theirs).abs().max()) <= MAX_LOGIT_GAP
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]
