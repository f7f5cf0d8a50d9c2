"""Text that grows token by token, exactly, and stop strings that end it."""

from collections.abc import Sequence

from engine.server.tokenizer import ModelTokenizer

_REPLACEMENT = "\ufffd"
_NUM_CONTEXT_IDS = 6


class IncrementalDetokenizer:
    """Turns a growing list of ids into text without changing what it has said.

    All pieces joined equal the decode of all ids at once. A piece that may still change is held
    back: the bytes of an unfinished character, and a run of fallback bytes, which decodes as a
    whole or not at all.

    Only a short window of ids is decoded: `_window[:_num_said]` gave the text before it, and is
    kept because some decoders treat the first token of a text differently.

    context_ids          what the text continues; all pieces are then what comes behind its text
    skip_special_tokens  as in the tokenizer's decode
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        *,
        context_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = self._usable_context(context_ids)
        self._num_said = len(self._window)
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is certain now and was not before."""
        if token_id in self._hidden_ids:
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_fallback_byte(token_id):
            return ""
        return self._grow(is_last=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._grow(is_last=True) if len(self._window) > self._num_said else ""

    def _usable_context(self, context_ids: Sequence[int]) -> list[int]:
        """The last tokens of the context, or none where they end inside a character."""
        window = list(context_ids[-_NUM_CONTEXT_IDS:])
        if not window or self._tokenizer.is_fallback_byte(window[-1]):
            return []
        return [] if self._decode(window).endswith(_REPLACEMENT) else window

    def _decode(self, token_ids: Sequence[int]) -> str:
        skips = bool(self._hidden_ids)
        if len(token_ids) == 1:  # what has been said, nearly always
            return self._tokenizer.decode_one(token_ids[0], skip_special_tokens=skips)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skips)

    def _grow(self, *, is_last: bool) -> str:
        said = self._decode(self._window[: self._num_said])
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and not is_last:
            return ""
        piece = text[len(said) :]
        if piece:
            self._window = self._window[self._num_said :]
            self._num_said = len(self._window)
            self.num_chars += len(piece)
        return piece


class StopMatcher:
    """Ends a text before the first stop string in it.

    Text is held back while it may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.has_matched = False

    def push(self, text: str) -> str:
        """Take more text; return what is certainly before any stop string."""
        assert not self.has_matched, "the text has ended"
        if not self._stops:
            return text
        starts = self._starts_of_stops_that_end_in(text)
        if starts:
            text = self._held + text
            self.has_matched = True
            self._held = ""
            return text[: min(starts)]
        return self.pass_by(text)

    def pass_by(self, text: str) -> str:
        """Take text in which no stop string may end; one that begins in it may end later."""
        text = self._held + text
        num_held = self._num_suspicious(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _starts_of_stops_that_end_in(self, text: str) -> list[int]:
        """Where in the held text and `text` stop strings begin that need some of `text`."""
        whole, num_held = self._held + text, len(self._held)
        starts = [whole.find(stop, max(0, num_held - len(stop) + 1)) for stop in self._stops]
        return [start for start in starts if start >= 0]

    def _num_suspicious(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
