"""Text that grows token by token, exactly, and stop strings that end it."""

from collections.abc import Sequence

from engine.server.tokenizer import ModelTokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns a growing list of ids into text without changing what it has said.

    All pieces joined equal the decode of all ids at once. A piece that may still change is held
    back: the bytes of an unfinished character, and a run of fallback bytes, which decodes as a
    whole or not at all.

    Only a short window of ids is decoded: `_window[:_num_said]` gave the text before it, and is
    kept because some decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_said = 0
        self.num_chars = 0

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is certain now and was not before."""
        if token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        if self._tokenizer.is_fallback_byte(token_id):
            return ""
        return self._grow(is_last=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._grow(is_last=True) if len(self._window) > self._num_said else ""

    def _grow(self, *, is_last: bool) -> str:
        said = self._tokenizer.decode(self._window[: self._num_said])
        text = self._tokenizer.decode(self._window)
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
        text = self._held + text
        starts = [start for start in map(text.find, self._stops) if start >= 0]
        if starts:
            self.has_matched = True
            self._held = ""
            return text[: min(starts)]
        num_held = self._num_suspicious(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _num_suspicious(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
