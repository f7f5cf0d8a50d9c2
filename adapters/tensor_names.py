"""What PEFT's tensor names mean: `base_model.model.model.layers.3.mlp.up_proj.lora_A.weight`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from adapters.base_description import OUTSIDE_GROUPS, PARENT_OF_TARGET, TARGET_GROUPS
from adapters.peft_format import TensorRef
from adapters.words import shorten

_PEFT_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<key>.+)\.lora_(?P<side>[AB])\.weight")
_MODULE = re.compile(r"(?P<root>model\.)?layers\.(?P<layer>\d+)\.(?P<parent>\w+)\.(?P<target>\w+)")
_WRAPPER = re.compile(
    r"^module\.|(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_EMBEDDING_FACTOR = re.compile(r"(?P<root>model\.)?embed_tokens\.lora_embedding_(?P<side>[AB])")
_HEAD_FACTOR = re.compile(r"lm_head\.lora_(?P<side>[AB])\.weight")
_SAVED = re.compile(
    r"(?:(?P<root>model\.)?(?P<embedding>embed_tokens)|lm_head)\.(?:base_layer\.)?weight"
)

# Kinds of tensor that PEFT writes beside plain factors, by a part of the name.
_OTHER_KINDS = (
    (".lora_magnitude_vector", "DoRA's magnitudes aren't served yet"),
    (".modules_to_save", "whole trained modules (modules_to_save) aren't served yet"),
    (".bias", "trained biases aren't served yet"),
    (".trainable_tokens", "trained token rows aren't served yet"),
    ("language_model.", "it belongs to the language part of a vision-language base"),
    ("vision", "it belongs to the vision part of a vision-language base"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleName:
    """One linear module of the base, as `model.layers.{layer}.{parent}.{target}`.

    Or one outside the layers, `model.embed_tokens` or `lm_head`; its layer is 0.
    """

    layer: int
    target: str

    def key(self, root: str) -> str:
        if self.target == "lm_head":
            return self.target
        if self.target in OUTSIDE_GROUPS:
            return root + self.target
        return f"{root}layers.{self.layer}.{PARENT_OF_TARGET[self.target]}.{self.target}"


@dataclass(slots=True, kw_only=True)
class SortedTensors:
    """The factors by module, and what is wrong with the rest.

    root    how the saving model called its decoder: "model." or "" (saved without the head)
    saved   whole matrices of the base that lie beside the factors, with their targets
    """

    root: str = "model."
    a: dict[ModuleName, TensorRef] = field(default_factory=dict)
    b: dict[ModuleName, TensorRef] = field(default_factory=dict)
    saved: list[tuple[str, TensorRef]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sort_tensors(tensors: Iterable[TensorRef]) -> SortedTensors:
    """Find the module and side of every tensor; what can't be applied becomes a problem."""
    result = SortedTensors()
    strange: dict[str, list[str]] = {}
    roots: set[str] = set()
    for tensor in tensors:
        found = _parse(tensor.name)
        if isinstance(found, str):
            strange.setdefault(found, []).append(tensor.name)
            continue
        if found.root is not None:
            roots.add(found.root)
        if found.side is None:
            result.saved.append((found.module.target, tensor))
            continue
        side = result.a if found.side == "A" else result.b
        if found.module in side:
            result.problems.append(
                f"{tensor.name} and {side[found.module].name} are the same factor, and which is "
                "meant isn't guessed"
            )
        side[found.module] = tensor
    result.problems += [f"{reason}: {shorten(names)}" for reason, names in strange.items()]
    if len(roots) > 1:
        result.problems.append(
            "some tensors are named below `model.` and some are not: they come from two different "
            "saves"
        )
    result.root = "" if roots == {""} else "model."
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    """What one name means. side is None for a whole matrix, root for a name that shows none."""

    module: ModuleName
    side: str | None
    root: str | None


def _parse(name: str) -> _Parsed | str:
    other = next((reason for part, reason in _OTHER_KINDS if part in name), None)
    if other is not None:
        return other
    # Wrappers of torch.compile, FSDP, checkpointing and DDP leave their mark, and change nothing.
    name = _WRAPPER.sub("", name)
    if not name.startswith(_PEFT_PREFIX):
        return f"PEFT's tensor names start with `{_PEFT_PREFIX}`; these don't"
    own = name[len(_PEFT_PREFIX) :]
    outside = _parse_outside(own)
    if outside is not None:
        return outside
    factor = _FACTOR.fullmatch(own)
    if factor is None:
        if re.search(r"\.lora_[AB]\.\w+\.weight$", name):
            return "an adapter's name stands inside the tensor names; save with save_pretrained"
        return "these tensors aren't lora_A.weight or lora_B.weight"
    module = _MODULE.fullmatch(factor["key"])
    if module is None or PARENT_OF_TARGET.get(module["target"]) != module["parent"]:
        return f"the base has no such module (it has {', '.join(TARGET_GROUPS)} in each layer)"
    if len(module["layer"]) > 6 or str(int(module["layer"])) != module["layer"]:
        return "the layer's number is malformed"
    found = ModuleName(layer=int(module["layer"]), target=module["target"])
    return _Parsed(module=found, side=factor["side"], root=module["root"] or "")


def _parse_outside(own: str) -> _Parsed | None:
    """Return what the name of an embedding's or head's tensor means; None for other names."""
    embedding, head = (
        ModuleName(layer=0, target="embed_tokens"),
        ModuleName(layer=0, target="lm_head"),
    )
    if (factor := _EMBEDDING_FACTOR.fullmatch(own)) is not None:
        return _Parsed(module=embedding, side=factor["side"], root=factor["root"] or "")
    if (factor := _HEAD_FACTOR.fullmatch(own)) is not None:
        return _Parsed(module=head, side=factor["side"], root=None)
    if (saved := _SAVED.fullmatch(own)) is not None:
        if saved["embedding"] is not None:
            return _Parsed(module=embedding, side=None, root=saved["root"] or "")
        return _Parsed(module=head, side=None, root=None)
    return None
