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
# The targets outside the layers; in the order of the forward pass, one before and one behind them.
OUTSIDE_GROUPS = {"embed_tokens": "embedding", "lm_head": "head"}
GROUP_OF_TARGET = TARGET_GROUPS | OUTSIDE_GROUPS
PARENT_OF_TARGET = {
    name: "self_attn" if group == "attention" else "mlp" for name, group in TARGET_GROUPS.items()
}


class LinearShape(msgspec.Struct, frozen=True):
    """Extents of one linear module: y[out_features] = W[out_features, in_features] x.

    An embedding counts as the linear module of a one-hot x: in_features is the vocabulary.
    """

    in_features: int
    out_features: int


class BaseDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The module table of one base; kept in Redis so that uploads need no worker.

    base_id             the public id, as in `base:adapter`
    identity            "sha256:…" over weights, format, dtype and rope
    modules             the seven targets' shapes, equal in all layers
    lora_rows           rank rows of an empty arena by group; empty when unknown
    embedding_digests   hex sha256 of the raw words of "embed_tokens" and "lm_head" by number format
                        ("F32", "F16", "BF16"); empty when unknown
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
    embedding_digests: dict[str, dict[str, str]] = {}

    def shape_of(self, target: str) -> LinearShape:
        """Return the extents of a target in the layers or outside them."""
        if target == "embed_tokens":
            return LinearShape(in_features=self.vocab_size, out_features=self.hidden)
        if target == "lm_head":
            return LinearShape(in_features=self.hidden, out_features=self.vocab_size)
        return self.modules[target]
