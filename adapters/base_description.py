"""What a base model looks like to an adapter: names and shapes, without weights."""

import msgspec

# The arena group of each LoRA target of the Llama layout, in the order of a layer.
TARGET_GROUPS = {
    "q_proj": "attention",
    "k_proj": "attention",
    "v_proj": "attention",
    "o_proj": "attention",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
PARENT_OF_TARGET = {
    name: "self_attn" if group == "attention" else "mlp" for name, group in TARGET_GROUPS.items()
}


class LinearShape(msgspec.Struct, frozen=True):
    """Extents of one linear module: y[out_features] = W[out_features, in_features] x."""

    in_features: int
    out_features: int


class BaseDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The module table of one base; kept in Redis so that uploads need no worker.

    base_id      the public id, as in `base:adapter`
    identity     "sha256:…" over weights, format, dtype and rope
    modules      the seven targets' shapes, equal in all layers
    lora_rows    rank rows of an empty arena by group; empty when unknown
    """

    base_id: str
    identity: str
    architecture: str
    num_layers: int
    hidden: int
    vocab_size: int
    max_model_len: int
    tie_word_embeddings: bool
    modules: dict[str, LinearShape]
    lora_rows: dict[str, int] = {}
