"""Tokenizers out of GGUF metadata give llama.cpp's ids, for every supported splitting."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from engine.model.gguf_metadata import GgufMetadata
from engine.model.gguf_tokenizer import tokenizer_json

DATA = Path(__file__).parents[2] / "data"
# Written by make_llama_cpp_token_ids.py beside it.
EXPECTED = json.loads((DATA / "llama_cpp_token_ids.json").read_text(encoding="utf-8"))
TEXTS: dict[str, str] = json.loads((DATA / "tokenizer_texts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def metadata_values(default_gguf: Path) -> dict[str, Any]:
    assert default_gguf.name == EXPECTED["vocabulary"]
    reader = gguf.GGUFReader(default_gguf)
    return {key: field.contents() for key, field in reader.fields.items()}


def tokenizer_of(values: dict[str, Any], **keys: Any) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return Tokenizer.from_str(tokenizer_json(GgufMetadata({**values, **changed})))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", EXPECTED["ids"])
def test_token_ids_equal_llama_cpp(pre: str, metadata_values: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(metadata_values, pre=pre)
    ids = {name: ids_of(tokenizer, text) for name, text in TEXTS.items()}
    expected = dict(EXPECTED["ids"][pre])
    if pre == "qwen2":
        # Qwen's tokenizer composes characters, which llama.cpp leaves out.
        del expected["decomposed"]
        composed = unicodedata.normalize("NFC", TEXTS["decomposed"])
        assert ids.pop("decomposed") == ids_of(tokenizer, composed)
    assert ids == expected


def test_decoding_gives_the_text_back(metadata_values: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(metadata_values)
    for text in TEXTS.values():
        assert tokenizer.decode(ids_of(tokenizer, text), skip_special_tokens=False) == text


def test_the_begin_token_is_added_where_the_file_says_so(metadata_values: dict[str, Any]) -> None:
    without = tokenizer_of(metadata_values, add_bos_token=False).encode("Hi").ids
    assert tokenizer_of(metadata_values, add_bos_token=True).encode("Hi").ids == [1, *without]
    silent = {k: v for k, v in metadata_values.items() if k != "tokenizer.ggml.add_bos_token"}
    assert tokenizer_of(silent).encode("Hi").ids == without
    assert tokenizer_of(silent, pre="llama-bpe").encode("Hi").ids[0] == 1


def test_control_tokens_are_special_and_user_defined_ones_are_text(
    metadata_values: dict[str, Any],
) -> None:
    types = list(metadata_values["tokenizer.ggml.token_type"])
    types[3] = gguf.TokenType.USER_DEFINED
    tokenizer = tokenizer_of(metadata_values, token_type=types)
    ids = tokenizer.encode("<repo_name>x<|im_end|>").ids
    assert ids[0] == 3
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<repo_name>x"
