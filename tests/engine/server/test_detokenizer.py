"""Text that grows token by token equals the decode of all tokens at once."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.server.detokenizer import IncrementalDetokenizer, StopMatcher
from engine.server.tokenizer import ModelTokenizer
from tests.engine.server.tiny_model import write_tiny_model

TEXTS = st.text(max_size=20)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> ModelTokenizer:
    folder = write_tiny_model(tmp_path_factory.mktemp("byte-level"))
    return ModelTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.fixture(scope="session")
def byte_fallback() -> ModelTokenizer:
    """As SentencePiece models are converted: words with a low line, and bytes as <0xNN>."""
    words = ["<unk>", "</s>", "\u2581", "\u2581hello", "\u2581world", "er", "ü", "\ufffd", "好"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return ModelTokenizer(tokenizer)


def grown(tokenizer: ModelTokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.finish()]


@given(data=st.data())
def test_pieces_join_to_the_whole_for_byte_level_ids(byte_level: ModelTokenizer, data):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    assert "".join(grown(byte_level, ids)) == byte_level.decode(ids)


@given(data=st.data())
def test_pieces_join_to_the_whole_for_fallback_ids(byte_fallback: ModelTokenizer, data):
    common = st.integers(0, 8)
    utf8 = TEXTS.map(lambda text: [9 + byte for byte in text.encode()])
    any_byte = st.integers(9, byte_fallback.vocab_size - 1)
    parts = st.lists(st.one_of(common.map(lambda i: [i]), utf8, any_byte.map(lambda i: [i])))
    ids = [token_id for part in data.draw(parts) for token_id in part]
    assert "".join(grown(byte_fallback, ids)) == byte_fallback.decode(ids)


@given(text=TEXTS)
def test_pieces_of_real_text_are_real_text(byte_level: ModelTokenizer, text: str):
    """No piece shows half a character."""
    ids = byte_level.encode_now(text, add_special_tokens=False)
    pieces = grown(byte_level, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces[:-1])


@given(data=st.data())
def test_pieces_continue_the_text_of_their_context(byte_fallback: ModelTokenizer, data):
    """A word behind a prompt keeps the space that it would lose at the beginning of a text."""
    ids = data.draw(st.lists(st.integers(0, 8), max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    context = byte_fallback.decode(ids[:cut])
    detokenizer = IncrementalDetokenizer(byte_fallback, context_ids=ids[:cut])
    pieces = [*map(detokenizer.push, ids[cut:]), detokenizer.finish()]
    if not context.endswith("\ufffd"):
        assert context + "".join(pieces) == byte_fallback.decode(ids)


def test_context_that_ends_inside_a_character_is_left_out(
    byte_level: ModelTokenizer, byte_fallback: ModelTokenizer
):
    smile = byte_level.encode_now("🙃🙂", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_level, context_ids=smile[:1])
    pieces = [*map(detokenizer.push, smile[1:]), detokenizer.finish()]
    assert "".join(pieces) == byte_level.decode(smile[1:])
    detokenizer = IncrementalDetokenizer(byte_fallback, context_ids=[3, 9 + 0xC3])
    assert detokenizer.push(9 + 0xBC) + detokenizer.finish() == "\ufffd"


def test_special_tokens_are_text_when_they_are_kept(byte_level: ModelTokenizer):
    ids = byte_level.encode_now("<|im_start|>go 🙂<|im_end|>", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_level, skip_special_tokens=False)
    pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert "".join(pieces) == "<|im_start|>go 🙂<|im_end|>"


def test_text_does_not_wait_for_the_end(byte_level: ModelTokenizer):
    ids = byte_level.encode_now("the quick 好 brown fox", add_special_tokens=False)
    *pieces, last = grown(byte_level, ids)
    assert last == ""
    assert len([piece for piece in pieces if piece]) > 3


@given(text=TEXTS)
def test_bytes_of_tokens_join_to_the_text(byte_level: ModelTokenizer, text: str):
    ids = byte_level.encode_now(text, add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


def test_bytes_of_fallback_tokens(byte_fallback: ModelTokenizer):
    assert byte_fallback.token_bytes(3) == b" hello"
    assert byte_fallback.token_bytes(9 + 0xE4) == b"\xe4"
    assert byte_fallback.token_bytes(1) == b"</s>"


SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=4)), stops=st.lists(SHORT, max_size=3))
def test_stop_strings_end_a_text_as_if_it_came_at_once(pieces: list[str], stops: list[str]):
    whole = "".join(pieces)
    starts = [whole.find(stop) for stop in stops if stop in whole]
    expected = whole[: min(starts)] if starts else whole
    matcher = StopMatcher(stops)
    said = ""
    for piece in pieces:
        said += matcher.push(piece)
        assert expected.startswith(said), "text behind a stop string was shown"
        if matcher.has_matched:
            break
    assert matcher.has_matched == bool(starts)
    assert said + matcher.finish() == expected


@given(
    early=st.lists(st.text(alphabet="abc", max_size=4), max_size=4),
    late=st.lists(st.text(alphabet="abc", max_size=4), max_size=4),
    stops=st.lists(SHORT, max_size=3),
)
def test_stop_strings_that_end_in_text_passed_by_end_nothing(early, late, stops):
    whole, num_early = "".join(early + late), len("".join(early))
    ends = []  # of stop strings in the late text: those of the earliest piece, by their beginning
    num_seen = num_early
    for piece in late:
        starts = [
            start
            for stop in stops
            for start in range(len(whole))
            if whole.startswith(stop, start)
            and num_seen < start + len(stop) <= num_seen + len(piece)
        ]
        num_seen += len(piece)
        if starts:
            ends = starts
            break
    expected = whole[: min(ends)] if ends else whole
    matcher = StopMatcher(stops)
    said = "".join(map(matcher.pass_by, early))
    for piece in late:
        said += matcher.push(piece)
        if matcher.has_matched:
            break
    assert matcher.has_matched == bool(ends)
    assert said + matcher.finish() == expected


def test_only_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Hello\n") == "Hello"
    assert matcher.push("you\n\n") == "\nyou"
    assert matcher.push("U") == ""
    assert matcher.push("n") == "\n\nUn"
