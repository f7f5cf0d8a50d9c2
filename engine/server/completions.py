"""POST /v1/completions."""

from starlette.requests import Request
from starlette.responses import Response

from engine.server.choice import Delta
from engine.server.errors import invalid
from engine.server.generation import start_generation
from engine.server.logprob_shapes import completion_logprobs
from engine.server.openai_responses import CompletionChoice
from engine.server.openai_schema import CompletionRequest
from engine.server.parsing import read_body
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
MAX_PROMPTS = 256


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
    if body.echo:
        raise invalid("only false is supported", "echo")
    prompts = await _prompt_ids(model, body.prompt)
    params = [
        sampling_params(
            body,
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_prompt_tokens=len(prompt),
            max_model_len=model.max_model_len,
            num_logprobs=body.logprobs,
            prompt_param="prompt",
        )
        for prompt in prompts
    ]
    generation = start_generation(
        core,
        prompts=prompts,
        params=params,
        lora_id=None if body.model == model.base_id else body.model,
        stops=stop_strings(body),
    )
    shape = CompletionShape(with_logprobs=body.logprobs is not None)
    return await respond(request, generation, shape=shape, body=body, metrics=worker.metrics)


async def _prompt_ids(
    model: ServedModel, prompt: str | list[str | int | list[int]]
) -> list[list[int]]:
    """The token ids of each prompt. Texts get the special tokens that the tokenizer adds."""
    if isinstance(prompt, str):
        prompt = [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    single = [item for item in prompt if isinstance(item, int)]
    several = [item for item in prompt if isinstance(item, list)]
    if max(len(texts), len(single), len(several)) < len(prompt):
        raise invalid("texts, token ids and lists of token ids can't be mixed", "prompt")
    if single:
        several = [single]
    elif texts:
        encode = model.tokenizer.encode
        several = [await encode(text, add_special_tokens=True) for text in texts]
    if len(several) > MAX_PROMPTS:
        raise invalid(f"{len(several)} prompts are more than {MAX_PROMPTS}", "prompt")
    if not several or not all(several):
        raise invalid("a prompt has no tokens", "prompt")
    for prompt_ids in several:
        check_token_ids(prompt_ids, vocab_size=model.ready.vocab_size, param="prompt")
    return several
