"""Which modules a config means, and with which rank and scale: PEFT's own key matching.

Keys are module names as the saving model had them, for example `model.layers.0.mlp.up_proj`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.patterns import Pattern, PatternMatcher
from adapters.peft_format import EffectiveConfig

_HEAD = "lm_head"
# PEFT wants a name before `layers`; a decoder saved alone has none, and means the same layers.
_ANY_LAYER = r"(?:.*?\.)?[^.]*\.(?P<idx>\d+)\."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSetting:
    """What the config says of one module that it targets."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """The modules that a config means, and the parts of it that mean none."""

    settings: dict[str, ModuleSetting]
    unused: tuple[str, ...]


def match_modules(config: EffectiveConfig, keys: Sequence[str]) -> Matching:
    """Return the setting of each key that PEFT would give an adapter, as PEFT computes it.

    Raises BadPattern when an expression is broken or can't be decided in time.
    """
    matcher = PatternMatcher(_patterns(config), keys)
    meant = [key for key in keys if _is_meant(config, key, matcher)]
    unused = [f"the target {target!r}" for target in _unmatched_targets(config, keys)]
    for field, names in (
        ("rank_pattern", config.rank_pattern),
        ("alpha_pattern", config.alpha_pattern),
    ):
        for name in names:
            pattern = _pattern_key(name)
            if not any(matcher.groups(pattern, key) is not None for key in meant):
                unused.append(f"{field}'s {name!r}")
    return Matching(
        settings={key: _setting(config, key, matcher) for key in meant}, unused=tuple(unused)
    )


def _unmatched_targets(config: EffectiveConfig, keys: Sequence[str]) -> tuple[str, ...]:
    targets = () if isinstance(config.target_modules, str) else config.target_modules
    suffixes = {suffix for key in keys for suffix in _suffixes(key)}
    return tuple(target for target in targets if target not in suffixes)


def _patterns(config: EffectiveConfig) -> list[Pattern]:
    patterns = [_pattern_key(key) for key in (*config.rank_pattern, *config.alpha_pattern)]
    if isinstance(config.target_modules, str) and not _is_all_linear(config):
        patterns.append(_full(config.target_modules))
    if isinstance(config.exclude_modules, str) and config.exclude_modules:
        patterns.append(_full(config.exclude_modules))
    if config.layers_to_transform:
        patterns += _layer_patterns(config)
    return patterns


def _is_meant(config: EffectiveConfig, key: str, matcher: PatternMatcher) -> bool:
    exclude = config.exclude_modules
    if isinstance(exclude, str):
        if exclude and matcher.groups(_full(exclude), key) is not None:
            return False
    elif _has_suffix(key, exclude):
        return False
    targets = config.target_modules
    if isinstance(targets, str):
        if _is_all_linear(config):
            return key != _HEAD and not key.endswith("embed_tokens")
        return matcher.groups(_full(targets), key) is not None
    if key in targets:
        # As in PEFT: a module named in full isn't asked for its layer.
        return True
    return _has_suffix(key, targets) and _is_layer_meant(config, key, matcher)


def _is_layer_meant(config: EffectiveConfig, key: str, matcher: PatternMatcher) -> bool:
    if not config.layers_to_transform:
        return True
    for pattern in _layer_patterns(config):
        groups = matcher.groups(pattern, key)
        if groups is not None:
            return int(groups["idx"]) in config.layers_to_transform
    return False


def _setting(config: EffectiveConfig, key: str, matcher: PatternMatcher) -> ModuleSetting:
    rank = _first(config.rank_pattern, key, matcher, config.lora_rank)
    alpha = _first(config.alpha_pattern, key, matcher, config.lora_alpha)
    return ModuleSetting(
        rank=rank, scale=alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    )


def _first(values: Mapping[str, Any], key: str, matcher: PatternMatcher, default: Any) -> Any:
    for name, value in values.items():
        if matcher.groups(_pattern_key(name), key) is not None:
            return value
    # PEFT falls back to looking the key itself up.
    return values.get(key, default)


def _is_all_linear(config: EffectiveConfig) -> bool:
    targets = config.target_modules
    return isinstance(targets, str) and targets.lower() == "all-linear"


def _has_suffix(key: str, names: Iterable[str]) -> bool:
    return not _suffixes(key).isdisjoint(names)


def _suffixes(key: str) -> set[str]:
    """Return the key and what follows each of its dots."""
    parts = key.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _full(expression: str) -> Pattern:
    return Pattern(expression=expression, whole=True, shown=expression)


def _pattern_key(name: str) -> Pattern:
    return Pattern(expression=rf"(.*\.)?({name})$", whole=False, shown=name)


def _layer_patterns(config: EffectiveConfig) -> list[Pattern]:
    if not config.layers_pattern:
        return [Pattern(expression=_ANY_LAYER, whole=False, shown="layers")]
    return [
        Pattern(expression=rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.", whole=False, shown=name)
        for name in config.layers_pattern
    ]
