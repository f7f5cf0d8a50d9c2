"""Decides whether a folder is an adapter that this base can apply exactly; says all that isn't."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.base_description import (
    GROUP_OF_TARGET,
    OUTSIDE_GROUPS,
    TARGET_GROUPS,
    BaseDescription,
)
from adapters.effect import adds_nothing
from adapters.limits import MAX_CONFIG_BYTES
from adapters.matching import ModuleSetting, match_modules
from adapters.patterns import BadPattern
from adapters.peft_config import read_config
from adapters.peft_format import (
    CONFIG_NAME,
    EffectiveConfig,
    ModuleLora,
    PeftAdapter,
    TensorRef,
)
from adapters.saved_base import find_problem
from adapters.tensor_names import ModuleName, SortedTensors, sort_tensors
from adapters.tensor_scan import scan_tensors
from adapters.weight_files import read_weights
from adapters.words import printable, shorten

NO_EFFECT_TEXT = "the adapter has no effect: in every module B times A is zero"
_MAX_TEXTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The verdict on one folder: an adapter, or problems; never both.

    notes      what was accepted though it looks odd, and why
    warnings   what the uploader should look at
    """

    adapter: PeftAdapter | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def has_no_effect(self) -> bool:
        """Whether a lack of any effect is the only thing that stands against it."""
        return self.problems == (NO_EFFECT_TEXT,)


def inspect_directory(
    directory: Path, base: BaseDescription, *, allow_no_effect: bool = False
) -> Inspection:
    """Inspect a flat folder against `base`: config and header first, then every byte.

    With allow_no_effect a lack of any effect is a warning instead of a problem. Raises OSError
    only when a file that is there can't be read.
    """
    report = _Report()
    config = _read_config(directory, report)
    weights = read_weights(directory)
    report.problems += weights.problems
    tensors = weights.tensors
    found = sort_tensors(tensors)
    report.problems += found.problems
    loras: list[ModuleLora] = []
    if config is not None:
        _check_against_base(config, base, report)
        loras = _resolve(config, found, base, report)
    _check_saved(found, base, report)
    saved = {tensor.name for _, tensor in found.saved}
    tensors = tuple(tensor for tensor in tensors if tensor.name not in saved)
    if tensors:
        _check_values(tensors, loras, report, allow_no_effect=allow_no_effect)
    if report.problems or config is None:
        return report.inspection(None)
    adapter = PeftAdapter(
        loras=tuple(loras),
        config=config,
        dtype=_common_dtype(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
    )
    report.problems += _capacity_problems(adapter, base)
    return report.inspection(None if report.problems else adapter)


class _Report:
    """Gathers what the checks have to say."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def inspection(self, adapter: PeftAdapter | None) -> Inspection:
        return Inspection(
            adapter=adapter,
            problems=_cut(self.problems),
            notes=_cut(self.notes),
            warnings=_cut(self.warnings),
        )


def _cut(texts: list[str]) -> tuple[str, ...]:
    distinct = list(dict.fromkeys(printable(text) for text in texts))
    more = len(distinct) - _MAX_TEXTS
    return (*distinct[:_MAX_TEXTS], *([f"and {more} more"] if more > 0 else []))


def _read_config(directory: Path, report: _Report) -> EffectiveConfig | None:
    path = directory / CONFIG_NAME
    if not path.is_file():
        report.problems.append(f"{CONFIG_NAME} is missing")
        return None
    with path.open("rb") as file:
        reading = read_config(file.read(MAX_CONFIG_BYTES + 1))
    report.problems += reading.problems
    report.notes += reading.notes
    return reading.config


def _check_against_base(config: EffectiveConfig, base: BaseDescription, report: _Report) -> None:
    name = config.base_model_name_or_path
    if config.base_model_class is not None:
        family = model_family(config.base_model_class)
        if family != model_family(base.architecture):
            report.problems.append(
                f"auto_mapping names the class {config.base_model_class}, and the base "
                f"{base.base_id} is {base.architecture}: the adapter was trained on another kind "
                "of model"
            )
    if name and _last_part(name) != _last_part(base.base_id):
        report.warnings.append(
            f"base_model_name_or_path is {name[:200]!r}, and the base is called "
            f"{base.base_id!r}: names prove little, the shapes are what was compared"
        )


def _last_part(name: str) -> str:
    """Return a model's own name: without owner, folder or case."""
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()


def model_family(architecture: str) -> str:
    """Return the bare family of a transformers class: LlamaForCausalLM and LlamaModel are llama."""
    name = architecture.lower().replace("_", "")
    for suffix in ("forcausallm", "lmheadmodel", "model"):
        name = name.removesuffix(suffix)
    return name


def _resolve(
    config: EffectiveConfig, found: SortedTensors, base: BaseDescription, report: _Report
) -> list[ModuleLora]:
    modules = [
        ModuleName(layer=layer, target=target)
        for layer in range(base.num_layers)
        for target in TARGET_GROUPS
        if target in base.modules
    ] + [ModuleName(layer=0, target=target) for target in OUTSIDE_GROUPS]
    keys = {module.key(found.root): module for module in modules}
    try:
        matching = match_modules(config, [*keys])
    except BadPattern as error:
        report.problems.append(str(error))
        return []
    meant = {keys[key]: setting for key, setting in matching.settings.items()}
    if not meant:
        report.problems.append(_no_match_text(config, base))
    if matching.unused:
        report.notes.append(
            f"{shorten(matching.unused)}: no module of this adapter on this base; PEFT passes "
            "over it too"
        )
    if not (found.a or found.b or found.saved or found.problems):
        return []
    _check_agreement(meant, found, base, report)
    return _build(meant, found, base, report)


def _check_saved(found: SortedTensors, base: BaseDescription, report: _Report) -> None:
    for target, tensor in found.saved:
        problem = find_problem(target, tensor, base)
        if problem is None:
            report.notes.append(f"{tensor.name} is the base's own matrix, so it is left out")
        else:
            report.problems.append(problem)


def _no_match_text(config: EffectiveConfig, base: BaseDescription) -> str:
    targets = config.target_modules
    shown = repr(targets[:120]) if isinstance(targets, str) else shorten(targets)
    return (
        f"target_modules ({shown or 'an empty list'}) names no linear module of {base.base_id}, "
        f"which has {', '.join(base.modules)} in each of its {base.num_layers} layers"
    )


def _check_agreement(
    meant: dict[ModuleName, ModuleSetting],
    found: SortedTensors,
    base: BaseDescription,
    report: _Report,
) -> None:
    present = found.a.keys() | found.b.keys()
    deep = sorted({module.layer for module in present if module.layer >= base.num_layers})
    if deep:
        report.problems.append(
            f"the weights have layer {deep[-1]}, but {base.base_id} has {base.num_layers} layers "
            f"(0 to {base.num_layers - 1}): the adapter was trained on another base"
        )
    groups = (
        ("the config doesn't target these modules, but the weights have them",
         [m for m in present if m not in meant and m.layer < base.num_layers]),
        ("the config targets these modules, but the weights don't have them",
         [m for m in meant if m not in present]),
        ("lora_B is missing for", [m for m in found.a if m not in found.b]),
        ("lora_A is missing for", [m for m in found.b if m not in found.a]),
    )  # fmt: skip
    for text, modules in groups:
        if modules:
            names = [module.key(found.root) for module in sorted(modules, key=_order)]
            report.problems.append(f"{text}: {shorten(names)}")


def _build(
    meant: dict[ModuleName, ModuleSetting],
    found: SortedTensors,
    base: BaseDescription,
    report: _Report,
) -> list[ModuleLora]:
    loras: list[ModuleLora] = []
    wrong: Counter[str] = Counter()
    first: dict[str, str] = {}
    for module in sorted(meant, key=_order):
        a, b = found.a.get(module), found.b.get(module)
        if a is None or b is None:
            continue
        setting = meant[module]
        shape = base.shape_of(module.target)
        for tensor, expected in (
            (a, (setting.rank, shape.in_features)),
            (b, (shape.out_features, setting.rank)),
        ):
            if tensor.shape != expected:
                text = f"{list(tensor.shape)} where the base and the rank want {list(expected)}"
                side = "A" if tensor is a else "B"
                text = f"{module.target}'s lora_{side} has shape {text}"
                wrong[text] += 1
                first.setdefault(text, tensor.name)
        loras.append(
            ModuleLora(
                layer=module.layer,
                target=module.target,
                rank=setting.rank,
                scale=setting.scale,
                a=a,
                b=b,
            )
        )
    report.problems += [
        f"{text}, in {count} of {base.num_layers} layers (first: {first[text]})"
        for text, count in wrong.items()
    ]
    return loras


def _check_values(
    tensors: Sequence[TensorRef],
    loras: Sequence[ModuleLora],
    report: _Report,
    *,
    allow_no_effect: bool,
) -> None:
    facts = scan_tensors(tensors)
    nan = [name for name, fact in facts.items() if fact.has_nan]
    infinite = [name for name, fact in facts.items() if fact.has_infinity]
    if nan:
        report.problems.append(f"NaN in {len(nan)} tensors: {shorten(nan)}")
    if infinite:
        report.problems.append(f"infinity in {len(infinite)} tensors: {shorten(infinite)}")
    # Where there are problems, shapes or values may be such that products can't be taken.
    has_products = not report.problems
    idle = [
        lora
        for lora in loras
        if facts[lora.a.name].is_all_zero
        or facts[lora.b.name].is_all_zero
        or (has_products and adds_nothing(lora))
    ]
    if idle and len(idle) == len(loras):
        (report.warnings if allow_no_effect else report.problems).append(NO_EFFECT_TEXT)
    elif idle:
        names = shorten(lora.a.name.partition(".lora_")[0] for lora in idle)
        report.warnings.append(
            f"B times A is zero in {len(idle)} of {len(loras)} modules, which have no effect: "
            f"{names}"
        )


def _capacity_problems(adapter: PeftAdapter, base: BaseDescription) -> list[str]:
    return [
        f"its rank in the {group} group is {num_rows}, but the whole arena of {base.base_id} has "
        f"{base.lora_rows[group]} rank rows there"
        for group, num_rows in adapter.rows().items()
        if num_rows > base.lora_rows.get(group, num_rows)
    ]


def _common_dtype(tensors: Iterable[TensorRef]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else "F32"


def _order(module: ModuleName) -> tuple[int, int]:
    return module.layer, list(GROUP_OF_TARGET).index(module.target)
