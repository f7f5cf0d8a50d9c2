"""A Hugging Face tokenizer out of GGUF metadata, token for token what llama.cpp makes of it."""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from engine.errors import InvalidModel
from engine.model.gguf_metadata import GgufMetadata

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LLAMA3_PARTS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splitting:
    """How one value of tokenizer.ggml.pre cuts text before merging.

    ignore_merges   a piece that is a token as a whole stays whole
    adds_bos        what a file that doesn't say add_bos_token means
    """

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _splitting_of(pre: str) -> _Splitting:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return _Splitting(pre_tokenizer=gpt2)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return _Splitting(pre_tokenizer=pre_tokenizers.Sequence([digits, gpt2]))
    if pre == "default":
        return _Splitting(pre_tokenizer=_by_regexes(*_DEFAULT_SPLITS))
    if pre == "llama-bpe":
        regex = _LLAMA3_PARTS.replace("{digits}", "{1,3}")
        return _Splitting(pre_tokenizer=_by_regexes(regex), ignore_merges=True, adds_bos=True)
    if pre == "qwen2":
        # Qwen's own tokenizer composes characters first; llama.cpp leaves that out, so the two
        # differ on decomposed text, and the model was trained on Qwen's.
        regex = _LLAMA3_PARTS.replace("{digits}", "")
        return _Splitting(pre_tokenizer=_by_regexes(regex), normalizer=normalizers.NFC())
    raise InvalidModel(
        f"the GGUF file's tokenizer splits text in a way of its own (tokenizer.ggml.pre is "
        f"{pre!r}); supported are smollm, gpt-2, default, llama-bpe and qwen2"
    )


def _by_regexes(*regexes: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in regexes]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


def tokenizer_json(metadata: GgufMetadata) -> str:
    """Return tokenizer.json; raises InvalidModel naming a vocabulary that isn't supported."""
    model = metadata.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise InvalidModel(
            f"the GGUF file has a vocabulary of type {model!r} (SentencePiece and others aren't "
            "supported); supported is byte-level BPE ('gpt2')"
        )
    splitting = _splitting_of(metadata.text("tokenizer.ggml.pre"))
    tokens = metadata.items("tokenizer.ggml.tokens")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise InvalidModel("the GGUF file's vocabulary has the same token twice")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.items("tokenizer.ggml.merges")]
    try:
        bpe = BPE(vocab=vocab, merges=merges, ignore_merges=splitting.ignore_merges)
    except Exception as error:
        raise InvalidModel(f"the GGUF file's merges don't fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(bpe)
    if splitting.normalizer is not None:
        tokenizer.normalizer = splitting.normalizer
    tokenizer.pre_tokenizer = splitting.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, tokens, metadata.items("tokenizer.ggml.token_type"))
    _add_template(tokenizer, metadata, tokens, adds_bos=splitting.adds_bos)
    return str(tokenizer.to_str())


def tokenizer_config(metadata: GgufMetadata, *, max_model_len: int) -> dict[str, Any]:
    """Return tokenizer_config.json: named tokens and the chat template."""
    tokens = metadata.items("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_model_len,
    }
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("pad_token", "padding"),
        ("unk_token", "unknown"),
    ):
        token_id = _special_id(metadata, key, len(tokens))
        if token_id is not None:
            config[name] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    return config


def generation_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Return generation_config.json: the tokens that begin and end an answer."""
    num_tokens = len(metadata.items("tokenizer.ggml.tokens"))
    ends = [_special_id(metadata, key, num_tokens) for key in ("eos", "eot", "eom")]
    eos_ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    config: dict[str, Any] = {"eos_token_id": eos_ids}
    bos_id = _special_id(metadata, "bos", num_tokens)
    if bos_id is not None:
        config["bos_token_id"] = bos_id
    return config


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Make control and user-defined tokens match before any splitting."""
    if len(types) != len(tokens):
        raise InvalidModel("the GGUF file has not one token type for each token")
    for kinds, special in (({_UNKNOWN, _CONTROL}, True), ({_USER_DEFINED}, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _add_template(
    tokenizer: Tokenizer, metadata: GgufMetadata, tokens: list[str], *, adds_bos: bool
) -> None:
    before = after = ""
    used: list[tuple[str, int]] = []
    bos_id = _special_id(metadata, "bos", len(tokens))
    if metadata.flag("tokenizer.ggml.add_bos_token", default=adds_bos) and bos_id is not None:
        before = f"{tokens[bos_id]} "
        used.append((tokens[bos_id], bos_id))
    eos_id = _special_id(metadata, "eos", len(tokens))
    if metadata.flag("tokenizer.ggml.add_eos_token", default=False) and eos_id is not None:
        after = f" {tokens[eos_id]}"
        used.append((tokens[eos_id], eos_id))
    if used:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{before}$A{after}",
            pair=f"{before}$A{after} {before}$B:1{after}",
            special_tokens=list(dict.fromkeys(used)),
        )


def _special_id(metadata: GgufMetadata, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    token_id = metadata.whole(key)
    if not 0 <= token_id < num_tokens:
        raise InvalidModel(f"the GGUF file's {key} is {token_id}, outside its vocabulary")
    return token_id


def as_json(content: dict[str, Any]) -> str:
    """Return `content` as a small JSON file's text."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
