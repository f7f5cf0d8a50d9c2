"""What GET /tokenizer_info says: the tokenizer's configuration, for clients that render prompts."""

from collections.abc import Mapping
from typing import Any

from engine.server.chat_template import special_tokens

_DEFAULT_CLASS = "PreTrainedTokenizerFast"


def tokenizer_info(config: Mapping[str, Any], *, chat_template: str | None) -> dict[str, Any]:
    """Tell tokenizer_config.json as vLLM does: special tokens as text, the template that is used.

    Where the model was trained or converted names files of that machine; they are left out.
    """
    info = {key: value for key, value in config.items() if not _names_a_file(key)}
    info.update(special_tokens(config))
    info.setdefault("tokenizer_class", _DEFAULT_CLASS)
    info.pop("chat_template", None)
    if chat_template is not None:
        info["chat_template"] = chat_template
    return info


def _names_a_file(key: str) -> bool:
    return key.endswith(("_file", "name_or_path"))
