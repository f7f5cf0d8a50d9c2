"""Which tensors a spec needs, and how they are laid into the decoder's packed weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.errors import InvalidModel
from engine.model.checkpoint import Checkpoint
from engine.model.decoder import Decoder
from engine.model.kernel_choice import KernelFactory
from engine.model.layers import LayerWeights
from engine.model.linear import PackedLinear, slice_rows, unpacked
from engine.model.spec import ModelSpec
from engine.model.step_kernels import PlainKernels

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_MAX_PROBLEMS_SHOWN = 8


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint of `spec` has."""
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (spec.vocab_size, spec.hidden),
        _FINAL_NORM: (spec.hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes[_HEAD] = (spec.vocab_size, spec.hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_tensors(spec).items()}
    return shapes


def find_problems(checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    """Return everything that keeps `checkpoint` from being a model of `spec`, in words."""
    expected = expected_tensors(spec)
    problems = [f"tensor {name} is missing" for name in expected if name not in checkpoint.names]
    for name in sorted(checkpoint.names):
        if name not in expected:
            if not _is_harmless(name, spec):
                problems.append(f"tensor {name} is not part of {spec.architecture}")
        elif checkpoint.shape(name) != expected[name]:
            problems.append(
                f"tensor {name} has shape {list(checkpoint.shape(name))}, but config.json "
                f"makes it {list(expected[name])}"
            )
    return problems


def build_decoder(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
    make_kernels: KernelFactory = PlainKernels,
) -> Decoder:
    """Read every tensor into memory of our own on `device`, packed and in `dtype`.

    Raises InvalidModel with all problems of names and shapes at once.
    """
    problems = find_problems(checkpoint, spec)
    if problems:
        shown = problems[:_MAX_PROBLEMS_SHOWN]
        rest = len(problems) - len(shown)
        raise InvalidModel("; ".join(shown) + (f"; and {rest} more" if rest else ""))
    reader = _Reader(checkpoint=checkpoint, dtype=dtype, device=device)
    embedding = reader.tensor(_EMBEDDING)
    if spec.tie_word_embeddings:
        _check_tied_head(checkpoint, embedding, reader)
        head = embedding
    else:
        head = reader.tensor(_HEAD)
    return Decoder(
        spec=spec,
        embedding=embedding,
        layers=[_layer(reader, spec, f"model.layers.{i}.") for i in range(spec.num_layers)],
        final_norm=reader.tensor(_FINAL_NORM),
        head=unpacked(head),
        max_model_len=max_model_len,
        make_kernels=make_kernels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str) -> torch.Tensor:
        out = torch.empty(self.checkpoint.shape(name), dtype=self.dtype, device=self.device)
        self._copy(out, name)
        return out

    def linear(self, prefix: str, targets: Sequence[str]) -> PackedLinear:
        """Lay the weights of `targets` under each other, and their biases behind each other."""
        shapes = [self.checkpoint.shape(f"{prefix}{target}.weight") for target in targets]
        widths = tuple(shape[0] for shape in shapes)
        out_features, in_features = sum(widths), shapes[0][1]
        weight = torch.empty((out_features, in_features), dtype=self.dtype, device=self.device)
        biases = [f"{prefix}{target}.bias" for target in targets]
        has_bias = any(name in self.checkpoint.names for name in biases)
        bias = None
        if has_bias:
            bias = torch.zeros(out_features, dtype=self.dtype, device=self.device)
        for target, bias_name, rows in zip(targets, biases, slice_rows(widths), strict=True):
            self._copy(weight[rows], f"{prefix}{target}.weight")
            if bias is not None:
                self._copy(bias[rows], bias_name)
        return PackedLinear(weight=weight, bias=bias, slice_out_features=widths)

    def _copy(self, out: torch.Tensor, name: str) -> None:
        self.checkpoint.dtype(name)  # refuses formats that can't be converted exactly enough
        self.checkpoint.copy_into(out, name)


def _layer(reader: _Reader, spec: ModelSpec, prefix: str) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qk_norm = None
    if spec.qk_norm:
        q_norm = reader.tensor(attention + "q_norm.weight").expand(spec.num_heads, -1)
        k_norm = reader.tensor(attention + "k_norm.weight").expand(spec.num_kv_heads, -1)
        qk_norm = torch.cat((q_norm, k_norm))
    return LayerWeights(
        input_norm=reader.tensor(prefix + "input_layernorm.weight"),
        qkv=reader.linear(attention, ("q_proj", "k_proj", "v_proj")),
        qk_norm=qk_norm,
        o=reader.linear(attention, ("o_proj",)),
        post_attention_norm=reader.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=reader.linear(mlp, ("gate_proj", "up_proj")),
        down=reader.linear(mlp, ("down_proj",)),
    )


def _layer_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    q, kv, hidden, inner = spec.q_features, spec.kv_features, spec.hidden, spec.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if spec.qk_norm:
        shapes["self_attn.q_norm.weight"] = (spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (spec.head_dim,)
    linears = (
        ("self_attn.q_proj", q, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, q, spec.o_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    )
    for name, out_features, in_features, has_bias in linears:
        shapes[f"{name}.weight"] = (out_features, in_features)
        if has_bias:
            shapes[f"{name}.bias"] = (out_features,)
    return shapes


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Old checkpoints carry rotary tables, tied ones may carry their head a second time."""
    return name.endswith(".rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == _HEAD)


def _check_tied_head(checkpoint: Checkpoint, embedding: torch.Tensor, reader: _Reader) -> None:
    if _HEAD not in checkpoint.names:
        return
    if checkpoint.shape(_HEAD) != tuple(embedding.shape) or not torch.equal(
        reader.tensor(_HEAD), embedding
    ):
        raise InvalidModel(
            "config.json ties the head to the embedding, but the checkpoint has a head of its own"
        )
