"""From OpenAI's request fields to what the core is told."""

from collections.abc import Sequence

from engine.errors import ContextLengthExceeded
from engine.protocol import SamplingParams
from engine.server.errors import invalid
from engine.server.openai_schema import SamplingFields


def check_shared_fields(body: SamplingFields, *, vocab_size: int) -> None:
    """Refuse what would be ignored: options of a stream that is none, ids that don't exist."""
    if body.stream_options is not None and not body.stream:
        raise invalid("only allowed together with stream", "stream_options")
    check_token_ids(body.stop_token_ids or (), vocab_size=vocab_size, param="stop_token_ids")
    check_token_ids(tuple(body.logit_bias or ()), vocab_size=vocab_size, param="logit_bias")


def check_token_ids(token_ids: Sequence[int], *, vocab_size: int, param: str) -> None:
    """Refuse ids that the model has no row for."""
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise invalid(f"token id {largest} is not below the vocabulary's size {vocab_size}", param)


def stop_strings(body: SamplingFields) -> tuple[str, ...]:
    """The stop strings, however they were written."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def sampling_params(
    body: SamplingFields,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    num_logprobs: int | None,
    prompt_param: str,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What the core is told about one prompt.

    An explicit max_tokens must fit behind the prompt; a default one shrinks to what fits, and
    `default_max_tokens` None means all of that.
    """
    room = max_model_len - num_prompt_tokens
    if room < (max_tokens or 1):
        error = ContextLengthExceeded(
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens or 1,
            max_model_len=max_model_len,
        )
        error.param = prompt_param
        raise error
    if max_tokens is None:
        max_tokens = room if default_max_tokens is None else min(room, default_max_tokens)
    if (body.min_tokens or 0) > max_tokens:
        raise invalid(f"{body.min_tokens} is more than max_tokens {max_tokens}", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=num_logprobs,
        n=body.n or 1,
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias or {},
        min_tokens=body.min_tokens or 0,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
