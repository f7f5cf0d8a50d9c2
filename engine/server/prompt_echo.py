"""A prompt as an answer repeats it: its text, and its tokens' logprobs when asked for."""

from collections.abc import Sequence

from engine.errors import EngineError
from engine.protocol import SequenceOutput, TokenLogprob
from engine.server.detokenizer import IncrementalDetokenizer
from engine.server.scores import TokenScores, given, score
from engine.server.tokenizer import ModelTokenizer


class PromptEcho:
    """One prompt, shared by the choices that begin with it.

    The text is the client's own where it sent one; else the text of all tokens, special ones
    too. `scores` is empty until the core has sent them, with the first output of the request.

    is_whole_answer  nothing was asked for but the prompt; what the core adds is dropped
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        prompt_ids: Sequence[int],
        *,
        text: str | None,
        is_scored: bool,
        is_whole_answer: bool,
    ) -> None:
        self.text = (
            tokenizer.decode(prompt_ids, skip_special_tokens=False) if text is None else text
        )
        self.is_whole_answer = is_whole_answer
        self.scores: tuple[TokenScores, ...] = ()
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._is_scored = is_scored

    def take(self, output: SequenceOutput) -> None:
        """Take a choice's first output, and the prompt's logprobs if it has them."""
        if not self._is_scored or self.scores:
            return
        if output.prompt_logprobs is None:
            raise EngineError("the engine sent no logprobs of the prompt")
        self.scores = tuple(self._written(output.prompt_logprobs))

    def _written(self, prompt_logprobs: Sequence[list[TokenLogprob] | None]) -> list[TokenScores]:
        written = []
        for token_id, logprobs, offset in zip(
            self._prompt_ids, prompt_logprobs, self._offsets(), strict=True
        ):
            if logprobs is None:
                written.append(given(self._tokenizer, token_id, text_offset=offset))
            else:
                written.append(score(self._tokenizer, logprobs, text_offset=offset))
        return written

    def _offsets(self) -> list[int]:
        """Where each token begins in the text.

        Tokens that the tokenizer put before the client's text, as a first special token, begin
        where it begins.
        """
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        pieces, offsets = [], []
        for token_id in self._prompt_ids:
            offsets.append(detokenizer.num_chars)
            pieces.append(detokenizer.push(token_id))
        pieces.append(detokenizer.finish())
        whole = "".join(pieces)
        num_added = len(whole) - len(self.text) if whole.endswith(self.text) else 0
        return [min(max(0, offset - num_added), len(self.text)) for offset in offsets]
