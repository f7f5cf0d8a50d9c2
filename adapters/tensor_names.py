"""What PEFT's tensor names mean: `base_model.model.model.layers.3.mlp.up_proj.lora_A.weight`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from adapters.base_description import PARENT_OF_TARGET, TARGET_GROUPS
from adapters.peft_format import TensorRef

_PEFT_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<key>.+)\.lora_(?P<side>[AB])\.weight")
_MODULE = re.compile(r"(?P<root>model\.)?layers\.(?P<layer>\d+)\.(?P<parent>\w+)\.(?P<target>\w+)")
_MAX_SHOWN = 4

# Kinds of tensor that PEFT writes beside plain factors, by a part of the name.
_OTHER_KINDS = (
    (".lora_magnitude_vector", "DoRA's magnitudes aren't served yet"),
    (".lora_embedding_", "LoRA on the embedding isn't served yet"),
    ("lm_head.lora_", "LoRA on the head (lm_head) isn't served yet"),
    (".modules_to_save", "whole trained modules (modules_to_save) aren't served yet"),
    ("embed_tokens", "trained or saved embeddings (embed_tokens) aren't served yet"),
    ("lm_head.", "a trained head (lm_head) isn't served yet"),
    (".bias", "trained biases aren't served yet"),
    (".trainable_tokens", "trained token rows aren't served yet"),
    ("language_model.", "it belongs to the language part of a vision-language base"),
    ("vision", "it belongs to the vision part of a vision-language base"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleName:
    """One linear module of the base, as `model.layers.{layer}.{parent}.{target}`."""

    layer: int
    target: str

    def key(self, root: str) -> str:
        return f"{root}layers.{self.layer}.{PARENT_OF_TARGET[self.target]}.{self.target}"


@dataclass(slots=True, kw_only=True)
class SortedTensors:
    """The factors by module, and what is wrong with the rest.

    root   how the saving model called its decoder: "model." or "" (saved without the head)
    """

    root: str = "model."
    a: dict[ModuleName, TensorRef] = field(default_factory=dict)
    b: dict[ModuleName, TensorRef] = field(default_factory=dict)
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
        name, side, root = found
        roots.add(root)
        (result.a if side == "A" else result.b)[name] = tensor
    result.problems = [f"{reason}: {shorten(names)}" for reason, names in strange.items()]
    if len(roots) > 1:
        result.problems.append(
            "some tensors are named below `model.layers` and some below `layers`: they come from "
            "two different saves"
        )
    result.root = "" if roots == {""} else "model."
    return result


def shorten(names: Iterable[str]) -> str:
    """List a few names and count the others."""
    listed = list(names)
    more = f" and {len(listed) - _MAX_SHOWN} more" if len(listed) > _MAX_SHOWN else ""
    return ", ".join(name[:160] for name in listed[:_MAX_SHOWN]) + more


def _parse(name: str) -> tuple[ModuleName, str, str] | str:
    other = next((reason for part, reason in _OTHER_KINDS if part in name), None)
    if other is not None:
        return other
    if not name.startswith(_PEFT_PREFIX):
        return f"PEFT's tensor names start with `{_PEFT_PREFIX}`; these don't"
    factor = _FACTOR.fullmatch(name[len(_PEFT_PREFIX) :])
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
    return found, factor["side"], module["root"] or ""
