"""One choice of an answer: from the core's tokens to text, logprobs and a finish reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import SequenceOutput, TokenLogprob
from engine.server.detokenizer import IncrementalDetokenizer, StopMatcher
from engine.server.tokenizer import ModelTokenizer, token_text

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
    """The logprobs of one place in the text: the token that was drawn and the likeliest ones."""

    drawn: ScoredToken
    likeliest: tuple[ScoredToken, ...]
    text_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step adds to one choice."""

    index: int
    text: str
    scores: tuple[TokenScores, ...] = ()
    finish_reason: str | None = None


class Choice:
    """Follows one core request and turns its outputs into deltas.

    The token that ended the text (end of turn, a stop id) is counted but belongs neither to the
    text nor to the logprobs. Scores travel with the text that they belong to, so they are held
    back with it.
    """

    def __init__(self, index: int, tokenizer: ModelTokenizer, stops: Sequence[str]) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._num_chars = 0
        self._scores: list[TokenScores] = []

    def take(self, output: SequenceOutput) -> Delta:
        """Turn an output of the core into what the client sees of it."""
        assert self.finish_reason is None, "nothing comes after the end"
        self.num_tokens += len(output.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        text = self._append(output)
        if self._matcher.has_matched:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            text += self._matcher.finish()
        self._num_chars += len(text)
        return Delta(
            index=self.index,
            text=text,
            scores=self._take_scores(),
            finish_reason=self.finish_reason,
        )

    def _append(self, output: SequenceOutput) -> str:
        token_ids = output.token_ids
        if output.stop_token_id is not None:
            token_ids = token_ids[:-1]
        text = ""
        for place, token_id in enumerate(token_ids):
            if output.logprobs is not None:
                self._scores.append(self._score(output.logprobs[place]))
            text += self._matcher.push(self._detokenizer.push(token_id))
            if self._matcher.has_matched:
                return text
        if output.finish_reason is not None:
            text += self._matcher.push(self._detokenizer.finish())
        return text

    def _score(self, logprobs: list[TokenLogprob]) -> TokenScores:
        drawn, *likeliest = (self._scored(entry) for entry in logprobs)
        return TokenScores(
            drawn=drawn, likeliest=tuple(likeliest), text_offset=self._detokenizer.num_chars
        )

    def _scored(self, entry: TokenLogprob) -> ScoredToken:
        raw = self._tokenizer.token_bytes(entry.token_id)
        logprob = max(entry.logprob, _LEAST_LOGPROB)
        return ScoredToken(text=token_text(raw), raw=raw, logprob=logprob)

    def _take_scores(self) -> tuple[TokenScores, ...]:
        """The scores of the text so far; at the end all, but those behind a stop string."""
        if self.finish_reason is not None and not self._matcher.has_matched:
            ready, self._scores = self._scores, []
            return tuple(ready)
        ready = [score for score in self._scores if score.text_offset < self._num_chars]
        self._scores = self._scores[len(ready) :]
        return tuple(ready)
