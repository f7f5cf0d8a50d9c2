"""POST /v1/completions."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from engine.server.choice import Delta, TextRules
from engine.server.errors import invalid
from engine.server.generation import Job, start_generation
from engine.server.logprob_shapes import completion_logprobs
from engine.server.openai_responses import CompletionChoice
from engine.server.openai_schema import CompletionRequest
from engine.server.origin import origin_of
from engine.server.parsing import read_body
from engine.server.prompt_echo import PromptEcho
from engine.server.respond import WholeChoice, respond
from engine.server.sampling_fields import (
    check_shared_fields,
    check_token_ids,
    sampling_params,
    stop_strings,
)
from engine.server.served_model import ServedModel
from engine.server.worker import worker_of

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """One prompt; `text` if the client sent text."""

    ids: list[int]
    text: str | None = None


class CompletionShape:
    """How completions are written; a chunk is a small whole."""

    endpoint = "completions"
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> None:
        del index

    def chunk(self, delta: Delta) -> CompletionChoice:
        return self._choice(delta)

    def whole(self, choice: WholeChoice) -> CompletionChoice:
        return self._choice(choice)

    def _choice(self, piece: Delta | WholeChoice) -> CompletionChoice:
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=completion_logprobs(piece.scores) if self._with_logprobs else None,
            finish_reason=piece.finish_reason,
        )


async def completions(request: Request) -> Response:
    """Continue one or several prompts."""
    worker = worker_of(request)
    body = await read_body(request, CompletionRequest)
    core = worker.core
    model = core.model
    check_shared_fields(body, vocab_size=model.ready.vocab_size)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("0 is only allowed together with echo", "max_tokens")
    prompts = await _prompts(model, body.prompt)
    if len(prompts) * (body.n or 1) > MAX_CHOICES:
        words = f"{len(prompts)} prompts of {body.n or 1} samples are more than {MAX_CHOICES}"
        raise invalid(words, "prompt")
    generation = start_generation(
        core,
        [_job(body, model, prompt) for prompt in prompts],
        lora_id=None if body.model == model.base_id else body.model,
        origin=origin_of(request.headers),
    )
    shape = CompletionShape(with_logprobs=body.logprobs is not None)
    return await respond(request, generation, shape=shape, body=body, metrics=worker.metrics)


def _job(body: CompletionRequest, model: ServedModel, prompt: _Prompt) -> Job:
    """What is asked of the core for one prompt. An echo alone still computes one token."""
    params = sampling_params(
        body,
        max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_prompt_tokens=len(prompt.ids),
        max_model_len=model.max_model_len,
        num_logprobs=body.logprobs,
        prompt_param="prompt",
        num_prompt_logprobs=body.logprobs if body.echo else None,
    )
    echo = None
    if body.echo:
        echo = PromptEcho(
            model.tokenizer,
            prompt.ids,
            text=prompt.text,
            is_scored=body.logprobs is not None,
            is_whole_answer=body.max_tokens == 0,
        )
    rules = TextRules(
        stops=stop_strings(body), min_tokens=params.min_tokens, context_ids=prompt.ids
    )
    return Job(prompt_ids=prompt.ids, params=params, rules=rules, echo=echo)


async def _prompts(model: ServedModel, prompt: str | list[str | int | list[int]]) -> list[_Prompt]:
    """The token ids of each prompt. Texts get the special tokens that the tokenizer adds."""
    if isinstance(prompt, str):
        prompt = [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    single = [item for item in prompt if isinstance(item, int)]
    several = [item for item in prompt if isinstance(item, list)]
    if max(len(texts), len(single), len(several)) < len(prompt):
        raise invalid("texts, token ids and lists of token ids can't be mixed", "prompt")
    if len(texts) + len(several) > MAX_CHOICES:
        raise invalid(f"{len(prompt)} prompts are more than {MAX_CHOICES}", "prompt")
    if texts:
        encode = model.tokenizer.encode
        found = [_Prompt(ids=await encode(t, add_special_tokens=True), text=t) for t in texts]
    else:
        found = [_Prompt(ids=ids) for ids in ([single] if single else several)]
    if not found or not all(prompt.ids for prompt in found):
        raise invalid("a prompt has no tokens", "prompt")
    for each in found:
        check_token_ids(each.ids, vocab_size=model.ready.vocab_size, param="prompt")
    return found
