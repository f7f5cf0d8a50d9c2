"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from engine.server.choice import Delta, TextRules
from engine.server.errors import invalid
from engine.server.generation import Job, start_generation
from engine.server.logprob_shapes import chat_logprobs
from engine.server.openai_responses import ChatChoice, ChatChunkChoice, ChatDelta, ChatMessage
from engine.server.openai_schema import ChatRequest, Message
from engine.server.origin import origin_of
from engine.server.parsing import read_body
from engine.server.respond import WholeChoice, respond
from engine.server.sampling_fields import check_shared_fields, sampling_params, stop_strings
from engine.server.served_model import ServedModel
from engine.server.worker import worker_of


class ChatShape:
    """How chat answers are written."""

    endpoint = "chat"
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def chunk(self, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            logprobs=chat_logprobs(delta.scores) if self._with_logprobs else None,
            finish_reason=delta.finish_reason,
        )

    def whole(self, choice: WholeChoice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role="assistant", content=choice.text),
            logprobs=chat_logprobs(choice.scores) if self._with_logprobs else None,
            finish_reason=choice.finish_reason,
        )


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    worker = worker_of(request)
    body = await read_body(request, ChatRequest)
    core = worker.core
    model = core.model
    check_shared_fields(body, vocab_size=model.ready.vocab_size)
    num_logprobs = _num_logprobs(body)
    text = render_messages(model, body.messages, add_generation_prompt=True)
    prompt = await model.tokenizer.encode(text, add_special_tokens=False)
    params = sampling_params(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        num_prompt_tokens=len(prompt),
        max_model_len=model.max_model_len,
        num_logprobs=num_logprobs,
        prompt_param="messages",
    )
    if not prompt:
        raise invalid("the prompt has no tokens", "messages")
    rules = TextRules(stops=stop_strings(body), min_tokens=params.min_tokens)
    generation = start_generation(
        core,
        [Job(prompt_ids=prompt, params=params, rules=rules)],
        lora_id=None if body.model == model.base_id else body.model,
        origin=origin_of(request.headers),
    )
    shape = ChatShape(with_logprobs=num_logprobs is not None)
    return await respond(request, generation, shape=shape, body=body, metrics=worker.metrics)


def render_messages(
    model: ServedModel, messages: Sequence[Message], *, add_generation_prompt: bool
) -> str:
    """Make the prompt of a conversation. Special tokens are the template's business."""
    if model.chat_template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions", param="messages"
        )
    return model.chat_template.render(
        [_as_template_sees(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
    )


def _as_template_sees(message: Message) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    seen = {"role": message.role, "content": content}
    if message.name is not None:
        seen["name"] = message.name
    return seen


def _num_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise invalid("needs logprobs to be true", "top_logprobs")
    return None
