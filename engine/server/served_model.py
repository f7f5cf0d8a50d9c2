"""What the server knows of the model that the core has loaded: its text side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from adapters.base_description import BaseDescription, LinearShape
from engine.protocol import CoreReady
from engine.server.chat_template import ChatTemplate, find_template, special_tokens
from engine.server.tokenizer import ModelTokenizer, load_tokenizer
from engine.server.tokenizer_info import tokenizer_info


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One base model, as text goes in and out of it."""

    ready: CoreReady
    tokenizer: ModelTokenizer
    chat_template: ChatTemplate | None
    tokenizer_info: dict[str, Any]

    @property
    def base_id(self) -> str:
        return self.ready.base_id

    @property
    def max_model_len(self) -> int:
        return self.ready.max_model_len

    def describe(self) -> BaseDescription:
        """The module table, for those who check adapters."""
        ready = self.ready
        modules = {
            name: LinearShape(in_features=shape.in_features, out_features=shape.out_features)
            for name, shape in ready.modules.items()
        }
        return BaseDescription(
            base_id=ready.base_id,
            identity=ready.base_identity,
            architecture=ready.architecture,
            num_layers=ready.num_layers,
            hidden=ready.hidden,
            vocab_size=ready.vocab_size,
            max_model_len=ready.max_model_len,
            tie_word_embeddings=ready.tie_word_embeddings,
            modules=modules,
            lora_rows=ready.lora_rows,
            embedding_digests=ready.embedding_digests,
        )


def load_served_model(ready: CoreReady) -> ServedModel:
    """Read tokenizer and chat template from the directory that the core names."""
    model_dir = Path(ready.model_dir)
    config = _read_json(model_dir / "tokenizer_config.json")
    source = find_template(model_dir, config)
    template = None if source is None else ChatTemplate(source, special_tokens(config))
    return ServedModel(
        ready=ready,
        tokenizer=load_tokenizer(model_dir / "tokenizer.json"),
        chat_template=template,
        tokenizer_info=tokenizer_info(config, chat_template=source),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
