"""The request fields that are served, with their types and ranges; nothing else is let in.

These types are the allow-list, the checks and the source of the OpenAPI document at once.
A field that isn't here is refused by name, so that none is ever ignored without a word.
`user`, `metadata` and `store` are taken, since they ask nothing of a model, and go no further.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1)]
Stop = Text | Annotated[list[Text], Meta(max_length=16)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = list[TokenId]
PositiveInt = Annotated[int, Meta(ge=1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[
    dict[TokenId, Bias], Meta(max_length=1024, description="by token id, written as a string")
]


class StreamOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One piece of a message; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One turn of a conversation.

    The fields after `name` let an answer be sent back as a client library keeps it; they are
    empty, or refused.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[None], Meta(max_length=0)] | None = None
    annotations: Annotated[list[None], Meta(max_length=0)] | None = None


class GenerationFields(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Fields that chat and plain completions share."""

    model: Text
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, description="0 or -1 for all tokens")] | None = None
    seed: Int64 | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    logit_bias: LogitBias | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None


class ChatCompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """The body of POST /v1/completions. Several prompts give several choices, by index."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0, description="0 only with echo")] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class TokenizeRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The body of POST /tokenize: a prompt, or messages. One base needs no `model`."""

    model: Text | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The body of POST /detokenize. One base needs no `model`."""

    tokens: TokenIds
    model: Text | None = None
