"""What lm-eval's `local-completions` sends, and what it makes of the answers.

Token-id prompts as lists of lists, echo, logprobs 1, max_tokens 1, a seed. Of the answer it takes
the token_logprobs behind the context and before the one generated token, and calls a continuation
greedy if each of its tokens is the likeliest of top_logprobs.
"""

import logging
from operator import itemgetter

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.end_to_end.grades import MAX_LOGIT_GAP
from tests.end_to_end.peft_reference import PeftReference, save_random_adapter, save_tiny_llama
from tests.end_to_end.serving import serving

pytestmark = pytest.mark.slow
logger = logging.getLogger(__name__)
END = 2
EXAMPLES = [
    (1, 3),
    (5, 1),
    (12, 8),
    (40, 2),
    (3, 60),
    (700, 5),
]  # tokens of context, of continuation


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A served tiny Llama with one adapter, and the same two in PEFT."""
    root = tmp_path_factory.mktemp("lm-eval")
    save_tiny_llama(root / "base")
    save_random_adapter(
        root / "base", root / "adapter", seed=5, r=8, target_modules=["q_proj", "v_proj"]
    )
    base = LlamaForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    reference = PeftReference(base, {"tuned": root / "adapter"})
    flags = [str(root / "base"), "--served-model-name", "tiny", "--dtype", "fp32"]
    flags += [f"--adapter=tuned={root / 'adapter'}", "--memory", "64MiB", "--num-threads", "1"]
    with (
        serving(*flags, state_dir=root / "state", log=root / "serve.log") as running,
        running.client() as http,
    ):
        yield http, reference


@pytest.fixture(scope="module")
def examples():
    """Random contexts and continuations."""
    generator = torch.Generator().manual_seed(11)
    sizes = [pair for pair in EXAMPLES for _ in range(3)]
    return [
        tuple(torch.randint(3, 512, (n,), generator=generator).tolist() for n in pair)
        for pair in sizes
    ]


def payload(prompts, model, **changes):
    return {
        "model": model,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        **changes,
    }


def asked(http: httpx.Client, body) -> list[dict]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=itemgetter("index"))


def as_lm_eval_reads(choice, num_context: int) -> tuple[float, bool]:
    values = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
    return sum(values), is_greedy


def expected(reference, context, continuation, *, name) -> tuple[float, bool]:
    """The log likelihood of a continuation, by transformers and PEFT."""
    logits = reference.logits(context + continuation, name=name)[len(context) - 1 : -1]
    ids = torch.tensor(continuation)
    total = logits.log_softmax(-1).gather(-1, ids[:, None]).sum()
    return float(total), bool((logits.argmax(-1) == ids).all())


@pytest.mark.parametrize(("model", "name"), [("tiny", None), ("tiny:tuned", "tuned")])
def test_loglikelihoods_are_those_of_transformers(world, examples, model, name, record_property):
    http, reference = world
    greedy = [
        (context, reference.greedy(context, name=name, num_tokens=3))
        for context, _ in examples[:12:3]
    ]
    largest_gap, num_greedy = 0.0, 0
    everything = examples + greedy
    for batch in (everything[first : first + 5] for first in range(0, len(everything), 5)):
        prompts = [context + continuation for context, continuation in batch]
        choices = asked(http, payload(prompts, model))
        assert len(choices) == len(batch)
        for (context, continuation), choice in zip(batch, choices, strict=True):
            total, is_greedy = as_lm_eval_reads(choice, len(context))
            their_total, they_are_greedy = expected(reference, context, continuation, name=name)
            gap = abs(total - their_total) / len(continuation)
            largest_gap, num_greedy = max(largest_gap, gap), num_greedy + is_greedy
            assert gap <= MAX_LOGIT_GAP
            assert is_greedy == they_are_greedy
    assert num_greedy >= len(greedy)
    logger.info("%s: largest gap of a token's logprob %.1e", model, largest_gap)


def test_lists_are_aligned_with_the_prompt(world, examples):
    http, reference = world
    context, continuation = examples[3]
    prompt = context + continuation
    (choice,) = asked(http, payload([prompt], "tiny"))
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["tokens"][: len(prompt)] == [f"w{token_id}" for token_id in prompt]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].lstrip().startswith(token)
    raw = reference.logits(prompt, name=None).log_softmax(-1)
    for place, top in enumerate(logprobs["top_logprobs"][1:]):
        assert max(top, key=top.get) == f"w{int(raw[place].argmax())}"


def test_an_end_token_that_was_generated_takes_no_place_of_the_prompt_s(world, examples):
    """lm-eval cuts the last entry off, whatever it is."""
    http, reference = world
    context, continuation = examples[0]
    forced = payload([context + continuation], "tiny", logit_bias={str(END): 100})
    (choice,) = asked(http, forced)
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(context + continuation) + 1
    total, _ = as_lm_eval_reads(choice, len(context))
    assert abs(total - expected(reference, context, continuation, name=None)[0]) < 3e-3


def test_prompts_alone_are_scored_too(world, examples):
    http, _ = world
    prompts = [context + continuation for context, continuation in examples[:6]]
    both = asked(http, payload(prompts, "tiny"))
    alone = asked(http, payload(prompts, "tiny", max_tokens=0))
    for with_token, without in zip(both, alone, strict=True):
        ours = without["logprobs"]["token_logprobs"]
        assert ours[0] is None
        assert ours[1:] == pytest.approx(with_token["logprobs"]["token_logprobs"][1:-1], abs=1e-3)


def test_a_warm_cache_changes_nothing(world, examples):
    """Logprobs of a prompt are computed, although its blocks are there."""
    http, _ = world
    prompts = [context + continuation for context, continuation in examples[-3:]]
    asked(http, {"model": "tiny", "prompt": prompts, "max_tokens": 1})
    first, again = (asked(http, payload(prompts, "tiny")) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one["logprobs"]["token_logprobs"][1:] == pytest.approx(
            other["logprobs"]["token_logprobs"][1:], abs=1e-3
        )


def test_the_tokenizer_is_served_as_lm_eval_asks_for_it(world):
    """Without a model name, at the root of the address."""
    http, _ = world
    assert http.get("/tokenizer_info").status_code == 200
    tokens = http.post("/tokenize", json={"prompt": "w5 w9", "add_special_tokens": False})
    assert tokens.json()["tokens"] == [5, 9]
    assert http.post("/detokenize", json={"tokens": [5, 9]}).json() == {"prompt": "w5 w9"}
