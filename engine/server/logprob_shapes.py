"""The two ways in which OpenAI writes logprobs."""

from collections.abc import Iterable

from engine.server.openai_responses import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    TopLogprob,
)
from engine.server.scores import ScoredToken, TokenScores


def chat_logprobs(scores: Iterable[TokenScores]) -> ChatLogprobs:
    """A list of tokens, each with its bytes and its likeliest alternatives."""
    return ChatLogprobs(
        content=[
            ContentLogprob(
                token=score.drawn.text,
                logprob=score.drawn.logprob,
                bytes=list(score.drawn.raw),
                top_logprobs=[
                    TopLogprob(token=token.text, logprob=token.logprob, bytes=list(token.raw))
                    for token in score.likeliest
                ],
            )
            for score in scores
        ]
    )


def completion_logprobs(scores: Iterable[TokenScores]) -> CompletionLogprobs:
    """Four lists. The drawn token is always among the top ones, so they may be one more.

    The first token of an echoed prompt has no logprob: both its entries are null.
    """
    scores = list(scores)
    return CompletionLogprobs(
        tokens=[score.drawn.text for score in scores],
        token_logprobs=[None if score.is_given else score.drawn.logprob for score in scores],
        top_logprobs=[
            None if score.is_given else _by_text((*score.likeliest, score.drawn))
            for score in scores
        ],
        text_offset=[score.text_offset for score in scores],
    )


def _by_text(tokens: Iterable[ScoredToken]) -> dict[str, float]:
    """The first of several tokens with one text wins: it is the likelier one."""
    table: dict[str, float] = {}
    for token in tokens:
        table.setdefault(token.text, token.logprob)
    return table
