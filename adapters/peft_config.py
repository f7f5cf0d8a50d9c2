"""Reads adapter_config.json: every field is applied, known never to decide, or refused by name."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from adapters.limits import MAX_CONFIG_BYTES, MAX_CONFIG_NAMES, MAX_CONFIG_PATTERNS
from adapters.peft_format import CONFIG_NAME, EffectiveConfig
from adapters.strict_json import NotStrictJson, parse_strict_json

LFS_POINTER_START = b"version https://git-lfs.github.com/spec/"
LFS_POINTER_TEXT = (
    "is a Git LFS pointer of about 130 bytes instead of the file: fetch the file with "
    "`git lfs pull`, then upload it again"
)
T = TypeVar("T")
_MAX_SHOWN_CHARS = 120

# What PEFT takes for the Llama family when no targets are given.
_DEFAULT_TARGETS = ("q_proj", "v_proj")

# Fields that only concern training, or say where things came from.
_NEVER_DECIDE = frozenset(
    {
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
# Read below, each in its own way.
_READ = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "fan_in_fan_out",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
# Fields of PEFT that change the forward pass in a way that isn't served; what each one means.
_NOT_SERVED = {
    "alora_invocation_tokens": "activated LoRA, which starts in the middle of a prompt",
    "arrow_config": "routing among several adapters",
    "corda_config": "training from a changed base",
    "enable_lora": "PEFT 0.2's partly enabled fused projections",
    "ensure_weight_tying": "adapters tied between embedding and head",
    "kasa_config": "KaSA",
    "layer_replication": "a base whose layers are repeated",
    "lora_bias": "a bias beside B",
    "lora_ga_config": "training from a changed base",
    "megatron_config": "Megatron's parallel layers",
    "modules_to_save": "whole modules replaced per adapter",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "LoRA on bare parameters, as in fused experts",
    "trainable_token_indices": "single embedding rows replaced per adapter",
    "use_bdlora": "block-diagonal LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
_KNOWN_TASKS = (None, "CAUSAL_LM")
_INERT_INITS = {True, False, None, "gaussian", "eva", "orthogonal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReading:
    """What a config says: `config` is None when even its basic fields can't be read."""

    config: EffectiveConfig | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_config(raw: bytes) -> ConfigReading:
    """Read the bytes of adapter_config.json and list everything that stands against it."""
    parsed = _parse(raw)
    if isinstance(parsed, str):
        return ConfigReading(config=None, problems=(parsed,))
    foreign = _foreign_format(parsed)
    if foreign is not None:
        return ConfigReading(config=None, problems=(foreign,))
    return _Reader(parsed).read()


def is_inert(value: Any) -> bool:
    """Tell whether a field that isn't understood holds nothing: null, false, {} or []."""
    return value is None or value is False or value in ({}, [])


def _parse(raw: bytes) -> dict[str, Any] | str:
    if raw.startswith(LFS_POINTER_START):
        return f"{CONFIG_NAME} {LFS_POINTER_TEXT}"
    if len(raw) > MAX_CONFIG_BYTES:
        return f"{CONFIG_NAME} has {len(raw)} bytes; at most {MAX_CONFIG_BYTES} are read"
    try:
        parsed = parse_strict_json(raw)
    except NotStrictJson as error:
        return f"{CONFIG_NAME} isn't JSON: {error}"
    if not isinstance(parsed, dict):
        return f"{CONFIG_NAME} must hold one JSON object, not {_words(parsed)}"
    return parsed


def _foreign_format(fields: Mapping[str, Any]) -> str | None:
    if "peft_type" in fields:
        kind = fields["peft_type"]
        if kind == "LORA":
            return None
        return f"peft_type is {_words(kind)}: only LoRA adapters are served (peft_type LORA)"
    if fields.keys() & {"lora_parameters", "fine_tune_type", "lora_layers"}:
        return (
            f"this {CONFIG_NAME} was written by MLX-LM, not by PEFT: its weights are transposed "
            "and its scale isn't alpha / r. Convert the adapter to PEFT's format (A and B "
            "transposed, lora_alpha = scale x rank, tensors named as PEFT names them), then "
            "upload adapter_config.json and adapter_model.safetensors"
        )
    if fields.get("version", "") and str(fields["version"]).startswith("adapters."):
        return (
            f"this {CONFIG_NAME} was written by the AdapterHub `adapters` library: such "
            "bottleneck adapters aren't LoRA and can't be served"
        )
    return (
        f"{CONFIG_NAME} has no peft_type, so it wasn't written by PEFT (it has "
        f"{_listed(fields)}): save the adapter with PEFT's save_pretrained"
    )


class _Reader:
    """Reads one PEFT config field by field and gathers what stands against it."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._problems: list[str] = []
        self._notes: list[str] = []

    def read(self) -> ConfigReading:
        self._check_features()
        self._check_unknown()
        config = EffectiveConfig(
            lora_rank=self._take("r", 8, _is_rank, "a whole number above 0"),
            lora_alpha=self._take("lora_alpha", 8, _is_alpha, "a number other than 0"),
            use_rslora=self._take("use_rslora", False, _is_bool, "true or false"),
            target_modules=self._targets(),
            exclude_modules=self._names_or_regex("exclude_modules"),
            rank_pattern=self._pattern("rank_pattern", _is_rank, "whole numbers above 0"),
            alpha_pattern=self._pattern("alpha_pattern", _is_alpha, "numbers other than 0"),
            layers_to_transform=self._layers(),
            layers_pattern=self._layers_pattern(),
            base_model_name_or_path=self._take("base_model_name_or_path", None, _is_text, "text"),
            base_model_class=self._base_model_class(),
            task_type=self._task_type(),
            peft_version=self._text_or_none("peft_version"),
        )
        self._check_layers(config)
        return ConfigReading(
            config=config, problems=tuple(self._problems), notes=tuple(self._notes)
        )

    def _take(self, key: str, default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        value = self._fields.get(key)
        if value is None:
            return default
        if fits(value):
            return value
        self._problems.append(f"{key} must be {wanted}, not {_words(value)}")
        return default

    def _text_or_none(self, key: str) -> str | None:
        value = self._fields.get(key)
        return value if isinstance(value, str) else None

    def _names_or_regex(self, key: str) -> tuple[str, ...] | str:
        value = self._take(key, (), _is_names_or_text, "a list of names or one text")
        return value if isinstance(value, str) else self._few(key, tuple(dict.fromkeys(value)))

    def _targets(self) -> tuple[str, ...] | str:
        if self._fields.get("target_modules") is None:
            self._notes.append(
                "target_modules is missing, so PEFT's default for the Llama family holds: "
                + ", ".join(_DEFAULT_TARGETS)
            )
            return _DEFAULT_TARGETS
        return self._names_or_regex("target_modules")

    def _pattern(self, key: str, fits: Callable[[Any], bool], wanted: str) -> dict[str, Any]:
        def is_pattern(value: Any) -> bool:
            return isinstance(value, dict) and all(fits(item) for item in value.values())

        pattern = self._take(key, {}, is_pattern, f"an object of names and {wanted}")
        return dict(self._few(key, tuple(pattern.items()), at_most=MAX_CONFIG_PATTERNS))

    def _layers(self) -> tuple[int, ...]:
        value = self._take(
            "layers_to_transform", (), _is_layers, "a layer's number or a list of them"
        )
        if isinstance(value, int):
            return (value,)
        return self._few("layers_to_transform", tuple(dict.fromkeys(value)))

    def _few(
        self, key: str, values: tuple[T, ...], *, at_most: int = MAX_CONFIG_NAMES
    ) -> tuple[T, ...]:
        """Return `values`, or none of them when matching so many would take too long."""
        if len(values) <= at_most:
            return values
        self._problems.append(f"{key} has {len(values)} entries; at most {at_most} are read")
        return ()

    def _layers_pattern(self) -> tuple[str, ...]:
        value = self._names_or_regex("layers_pattern")
        if isinstance(value, str):
            return (value,) if value else ()
        return value

    def _check_layers(self, config: EffectiveConfig) -> None:
        if config.layers_to_transform and isinstance(config.target_modules, str):
            self._problems.append(
                "layers_to_transform can't stand beside a target_modules that is one text; "
                "PEFT doesn't load that either"
            )
        if config.layers_pattern and not config.layers_to_transform:
            self._problems.append(
                "layers_pattern needs layers_to_transform; PEFT doesn't load it alone either"
            )

    def _task_type(self) -> str | None:
        task = self._fields.get("task_type")
        if task not in _KNOWN_TASKS:
            self._problems.append(
                f"task_type is {_words(task)}: only causal language models are served"
            )
        return task if isinstance(task, str) else None

    def _base_model_class(self) -> str | None:
        mapping = self._fields.get("auto_mapping")
        if mapping is None:
            return None
        if not isinstance(mapping, dict):
            self._problems.append(f"auto_mapping must be an object, not {_words(mapping)}")
            return None
        name = mapping.get("base_model_class")
        return name[:_MAX_SHOWN_CHARS] if isinstance(name, str) else None

    def _check_features(self) -> None:
        bias = self._fields.get("bias")
        if bias not in (None, "none"):
            self._problems.append(f"bias is {_words(bias)}: trained biases aren't served yet")
        if not is_inert(self._fields.get("fan_in_fan_out")):
            self._problems.append(
                f"fan_in_fan_out is {_words(self._fields['fan_in_fan_out'])}: layers that store "
                "their weights transposed (GPT-2's Conv1D) aren't served"
            )
        init = self._fields.get("init_lora_weights")
        if not isinstance(init, bool | str | None) or init not in _INERT_INITS:
            self._problems.append(
                f"init_lora_weights is {_words(init)}: training started from a changed base. "
                "Convert the adapter with PEFT's path_initial_model_for_weight_conversion"
            )
        for key, meaning in _NOT_SERVED.items():
            value = self._fields.get(key)
            if not is_inert(value):
                self._problems.append(f"{key} is {_words(value)}: {meaning}; not served yet")

    def _check_unknown(self) -> None:
        known = _NEVER_DECIDE | _READ | _NOT_SERVED.keys()
        for key in self._fields:
            if key in known:
                continue
            value = self._fields[key]
            if is_inert(value):
                self._notes.append(f"the unknown field {_words(key)} is {_words(value)}: ignored")
            else:
                self._problems.append(
                    f"the unknown field {_words(key)} is {_words(value)}: it may change what the "
                    "adapter does, and nothing is known of it"
                )


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20


def _is_alpha(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value != 0 and abs(value) < 1e30 and math.isfinite(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names_or_text(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, str)


def _is_layers(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 20 for i in items)


def _words(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def _listed(names: Mapping[str, Any]) -> str:
    shown = list(names)[:8]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return (", ".join(name[:60] for name in shown) + more) or "nothing in it"
