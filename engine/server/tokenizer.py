"""The model's tokenizer: text to ids, ids to text, and the bytes behind one token."""

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# Above this many characters a text is encoded in a thread, so that others' streams go on.
_INLINE_CHARS = 4096
_MAX_REMEMBERED = 8192


class ModelTokenizer:
    """The `tokenizers` library on one tokenizer.json, without truncation or padding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = json.loads(tokenizer.to_str())["decoder"]
        kinds = set(_kinds(decoder))
        self._bytes_of_char = _bytes_of_char() if "ByteLevel" in kinds else None
        self._has_byte_fallback = "ByteFallback" in kinds
        self._written: dict[int, tuple[bytes, str]] = {}  # at most the vocabulary
        self.decode_one = lru_cache(maxsize=_MAX_REMEMBERED)(self._decode_one)

    @property
    def vocab_size(self) -> int:
        """Ids that have a token, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Turn text into ids; long texts don't stop the event loop."""
        if len(text) <= _INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Turn text into ids. The batch call gives other threads the lock meanwhile."""
        encodings = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def is_fallback_byte(self, token_id: int) -> bool:
        """Tell whether a token is one byte of a character, as `<0xE4>`."""
        return self._has_byte_fallback and _fallback_byte(self._token(token_id)) is not None

    def written(self, token_id: int) -> tuple[bytes, str]:
        """A token as logprobs write it: its bytes, and its text."""
        known = self._written.get(token_id)
        if known is None:
            raw = self.token_bytes(token_id)
            known = self._written[token_id] = raw, token_text(raw)
        return known

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in the middle of a text."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._token(token_id)
        if self._bytes_of_char is not None:
            return _byte_level_bytes(token, self._bytes_of_char)
        byte = _fallback_byte(token) if self._has_byte_fallback else None
        return byte if byte is not None else token.replace("\u2581", " ").encode()

    def _decode_one(self, token_id: int, *, skip_special_tokens: bool) -> str:
        """Turn one id into text as `decode` does; `decode_one` remembers the usual ones."""
        return self.decode([token_id], skip_special_tokens=skip_special_tokens)

    def _token(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""


def token_text(raw: bytes) -> str:
    """One token as OpenAI writes it: text, or `bytes:\\xe4\\xbd` where it is no whole text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def load_tokenizer(path: Path) -> ModelTokenizer:
    """Read a tokenizer.json."""
    return ModelTokenizer(Tokenizer.from_file(str(path)))


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    """Names of a decoder and of those inside it."""
    if decoder is None:
        return []
    inner = [kind for part in decoder.get("decoders", ()) for kind in _kinds(part)]
    return [decoder["type"], *inner]


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_level_bytes(token: str, bytes_of_char: dict[str, int]) -> bytes:
    try:
        return bytes(bytes_of_char[char] for char in token)
    except KeyError:
        return token.encode()


def _bytes_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 is itself, other bytes follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table
