"""An adapter as PEFT writes it, once every field has been understood: values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adapters.base_description import GROUP_OF_TARGET, OUTSIDE_GROUPS

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
INDEX_NAME = "adapter_model.safetensors.index.json"

# How the raw words of each supported number format look to numpy, which has no bfloat16.
WORD_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """Where one tensor's bytes lie in a safetensors file; `offset` counts from the file's start."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def read(self) -> np.ndarray[Any, Any]:
        """Map the values: float32, float16, or uint16 words for BF16, in `shape`; read-only."""
        word = WORD_TYPES[self.dtype]
        return np.memmap(self.file, dtype=word, mode="r", offset=self.offset, shape=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLora:
    """The two factors on one linear module: y += scale · (x Aᵀ) Bᵀ.

    layer is 0 for a target outside the layers. For embed_tokens x is one-hot: rows of Aᵀ.

    a   [lora_rank, in_features]
    b   [out_features, lora_rank]
    """

    layer: int
    target: str
    rank: int
    scale: float
    a: TensorRef
    b: TensorRef

    @property
    def group(self) -> str:
        return GROUP_OF_TARGET[self.target]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveConfig:
    """The fields of adapter_config.json that decide something, with PEFT's defaults filled in.

    target_modules      a list of suffixes, or one string: a regular expression or "all-linear"
    rank_pattern        in the file's order, because PEFT takes the first key that matches
    base_model_class    read from auto_mapping as text; never imported
    """

    lora_rank: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    target_modules: tuple[str, ...] | str = ()
    exclude_modules: tuple[str, ...] | str = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    base_model_name_or_path: str | None = None
    base_model_class: str | None = None
    task_type: str | None = None
    peft_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """Every low-rank update of one adapter, in the order of layers and of targets in a layer.

    dtype       the number format of all tensors, or the widest where they differ
    num_bytes   of all tensors as stored
    """

    loras: tuple[ModuleLora, ...]
    config: EffectiveConfig
    dtype: str
    num_bytes: int

    @property
    def max_rank(self) -> int:
        return max(lora.rank for lora in self.loras)

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the targets that it touches: those of a layer in order, then the others."""
        used = {lora.target for lora in self.loras}
        return tuple(target for target in GROUP_OF_TARGET if target in used)

    @property
    def num_layer_modules(self) -> int:
        """How many modules of layers it touches."""
        return sum(lora.target not in OUTSIDE_GROUPS for lora in self.loras)

    def rows(self) -> dict[str, int]:
        """Return the rank rows that it needs in each group: the largest rank there."""
        rows: dict[str, int] = {}
        for lora in self.loras:
            rows[lora.group] = max(rows.get(lora.group, 0), lora.rank)
        return rows
