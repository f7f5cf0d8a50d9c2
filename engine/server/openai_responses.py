"""What clients get: OpenAI's response bodies. `model` comes early, for those who rewrite it."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt's tokens, those that others had computed earlier."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One likely token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a chat choice."""

    content: list[ContentLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a completion choice: four lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    role: str
    content: str


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a completion, whole or a chunk of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk of it; `usage` is null in chunks before the last."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
