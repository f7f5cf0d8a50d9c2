"""One choice of an answer: from the core's tokens to text, logprobs and a finish reason."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.protocol import SequenceOutput
from engine.server.detokenizer import IncrementalDetokenizer, StopMatcher
from engine.server.prompt_echo import PromptEcho
from engine.server.scores import TokenScores, score
from engine.server.tokenizer import ModelTokenizer


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step adds to one choice; made for each token, so it isn't a slow dataclass."""

    index: int
    text: str
    scores: tuple[TokenScores, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How the tokens of an answer become its text.

    stops        strings that end it
    min_tokens   no stop string ends it before it has more tokens than these
    context_ids  the prompt, where the answer continues its text
    """

    stops: Sequence[str] = ()
    min_tokens: int = 0
    context_ids: Sequence[int] = ()


class Choice:
    """Follows one sample of a core request and turns its outputs into deltas.

    The token that ended the text (end of turn, a stop id) is counted and scored, but isn't part
    of the text. Scores travel with the text that they belong to, so they are held back with it.
    With an echo the first delta begins with the prompt.
    """

    def __init__(
        self,
        index: int,
        tokenizer: ModelTokenizer,
        rules: TextRules,
        *,
        echo: PromptEcho | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._rules = rules
        self._echo = echo
        self._detokenizer = IncrementalDetokenizer(tokenizer, context_ids=rules.context_ids)
        self._matcher = StopMatcher(rules.stops)
        self._num_echo_chars = 0 if echo is None else len(echo.text)
        self._num_chars = self._num_echo_chars
        self._num_pushed = 0
        self._scores: list[TokenScores] = []

    def take(self, output: SequenceOutput) -> Delta:
        """Turn an output of the core into what the client sees of it."""
        assert self.finish_reason is None, "nothing comes after the end"
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        echo, self._echo = self._echo, None
        if echo is not None:
            echo.take(output)
            if echo.is_whole_answer:
                self.finish_reason = "length"
                return self._delta(echo.text, echo.scores)
        self.num_tokens += len(output.token_ids)
        text = self._append(output)
        if self._matcher.has_matched:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            text += self._matcher.finish()
        self._num_chars += len(text)
        scores = self._take_scores()
        if echo is not None:
            return self._delta(echo.text + text, echo.scores + scores)
        return self._delta(text, scores)

    def _delta(self, text: str, scores: tuple[TokenScores, ...]) -> Delta:
        return Delta(index=self.index, text=text, scores=scores, finish_reason=self.finish_reason)

    def _append(self, output: SequenceOutput) -> str:
        num_shown = len(output.token_ids) - (output.stop_token_id is not None)
        text = ""
        for place, token_id in enumerate(output.token_ids[:num_shown]):
            self._score(output, place)
            self._num_pushed += 1
            text += self._match(self._detokenizer.push(token_id))
            if self._matcher.has_matched:
                return text
        if output.finish_reason is not None:
            text += self._match(self._detokenizer.finish())
        if output.stop_token_id is not None and not self._matcher.has_matched:
            self._score(output, num_shown)
        return text

    def _match(self, text: str) -> str:
        if self._num_pushed <= self._rules.min_tokens:
            return self._matcher.pass_by(text)
        return self._matcher.push(text)

    def _score(self, output: SequenceOutput, place: int) -> None:
        if output.logprobs is not None:
            offset = self._num_echo_chars + self._detokenizer.num_chars
            scored = score(self._tokenizer, output.logprobs[place], text_offset=offset)
            self._scores.append(scored)

    def _take_scores(self) -> tuple[TokenScores, ...]:
        """The scores of the text so far; at the end all, but those behind a stop string."""
        if not self._scores:
            return ()
        if self.finish_reason is not None and not self._matcher.has_matched:
            ready, self._scores = self._scores, []
            return tuple(ready)
        ready = [scored for scored in self._scores if scored.text_offset < self._num_chars]
        self._scores = self._scores[len(ready) :]
        return tuple(ready)
