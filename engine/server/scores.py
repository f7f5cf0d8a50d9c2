"""Logprobs of tokens, with the tokens as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import TokenLogprob
from engine.server.tokenizer import ModelTokenizer

# JSON has no infinity; OpenAI writes this for a token that can't be drawn.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token as it is written in logprobs."""

    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """The logprobs of one place in the text: the token that is there and the likeliest ones.

    is_given  the first token of a prompt: nothing before it says how likely it is
    """

    drawn: ScoredToken
    likeliest: tuple[ScoredToken, ...]
    text_offset: int
    is_given: bool = False


def score(
    tokenizer: ModelTokenizer, logprobs: Sequence[TokenLogprob], *, text_offset: int
) -> TokenScores:
    """Write the logprobs of one place, the token that is there first."""
    drawn, *likeliest = (_scored(tokenizer, entry) for entry in logprobs)
    return TokenScores(drawn=drawn, likeliest=tuple(likeliest), text_offset=text_offset)


def given(tokenizer: ModelTokenizer, token_id: int, *, text_offset: int) -> TokenScores:
    """Write the first token of a prompt."""
    drawn = _scored(tokenizer, TokenLogprob(token_id, 0.0))
    return TokenScores(drawn=drawn, likeliest=(), text_offset=text_offset, is_given=True)


def _scored(tokenizer: ModelTokenizer, entry: TokenLogprob) -> ScoredToken:
    raw, text = tokenizer.written(entry.token_id)
    return ScoredToken(text=text, raw=raw, logprob=max(entry.logprob, _LEAST_LOGPROB))
