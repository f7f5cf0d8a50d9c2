"""The files that hold an adapter's tensors: one, or numbered shards with an index beside them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from adapters.folder import missing_weights_text
from adapters.limits import MAX_HEADER_BYTES
from adapters.peft_format import INDEX_NAME, WEIGHTS_NAME, TensorRef
from adapters.safetensors_header import read_header
from adapters.shards import find_shards
from adapters.strict_json import NotStrictJson, parse_strict_json
from adapters.words import shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReading:
    """Every tensor of an adapter's files; empty when one of them can't be read."""

    tensors: tuple[TensorRef, ...] = ()
    problems: tuple[str, ...] = ()


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the files that hold an adapter's tensors and their index, in name order, if any."""
    names = {entry.name for entry in directory.iterdir()}
    if WEIGHTS_NAME in names:
        return (directory / WEIGHTS_NAME,)
    shards = find_shards(names)
    index = [INDEX_NAME] if INDEX_NAME in names and shards.names else []
    return tuple(directory / name for name in sorted([*shards.names, *index]))


def read_weights(directory: Path) -> WeightsReading:
    """Read the headers of all weight files in a flat folder, and list what is wrong with them."""
    names = sorted(entry.name for entry in directory.iterdir())
    files = [file for file in weight_files(directory) if file.name != INDEX_NAME]
    if not files:
        problem = missing_weights_text(names, folder=PurePosixPath("."))
        return WeightsReading(problems=(problem,))
    readings = [read_header(file) for file in files]
    problems = [problem for reading in readings for problem in reading.problems]
    tensors = [tensor for reading in readings for tensor in reading.tensors]
    if files[0].name != WEIGHTS_NAME:
        problems += find_shards(names).problems
        if not problems and INDEX_NAME in names:
            problems += _index_problems(directory / INDEX_NAME, tensors)
    if not problems and not tensors:
        problems.append(f"{files[0].name} holds no tensors")
    return WeightsReading(tensors=() if problems else tuple(tensors), problems=tuple(problems))


def _index_problems(index: Path, tensors: Collection[TensorRef]) -> list[str]:
    """Compare an index with what the shards hold: a cut download shows here."""
    weight_map = _weight_map(index)
    if isinstance(weight_map, str):
        return [f"{INDEX_NAME} {weight_map}"]
    held = {(tensor.name, tensor.file.name) for tensor in tensors}
    named = set(weight_map.items())
    groups: Iterable[tuple[str, set[tuple[str, Any]]]] = (
        ("names tensors that its shards don't hold", named - held),
        ("doesn't name tensors that its shards hold", held - named),
    )
    return [
        f"{INDEX_NAME} {text}: {shorten(name for name, _ in sorted(odd, key=str))}"
        for text, odd in groups
        if odd
    ]


def _weight_map(index: Path) -> Mapping[str, str] | str:
    with index.open("rb") as file:
        raw = file.read(MAX_HEADER_BYTES + 1)
    if len(raw) > MAX_HEADER_BYTES:
        return f"is larger than {MAX_HEADER_BYTES} bytes"
    try:
        fields = parse_strict_json(raw)
    except NotStrictJson as error:
        return f"isn't JSON: {error}"
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        return "has no weight_map of names"
    return weight_map
