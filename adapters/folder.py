"""Which files of an upload are the adapter, judged by their names alone."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from adapters.peft_format import CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from adapters.shards import find_shards

_ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip", ".tar.bz2", ".tar.xz", ".7z", ".rar")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What `printable` makes of characters that can't be seen.
_ESCAPED = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[tnr])")
_MAX_LOOKALIKES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to take of a folder: member name -> flat name; the rest is skipped and reported."""

    taken: dict[str, str]
    skipped: tuple[str, ...]
    problems: tuple[str, ...]


def select_files(names: Iterable[str]) -> Selection:
    """Choose the one adapter among `names`, paths with `/`; never guess between two.

    A config below the folder of a whole adapter, without weights of its own, is no second one: a
    trainer leaves such folders behind.
    """
    members = sorted(set(names))
    lookalikes = [text for text in map(_lookalike_text, members) if text is not None]
    if lookalikes:
        return Selection(taken={}, skipped=(), problems=tuple(lookalikes[:_MAX_LOOKALIKES]))
    configs = [name for name in members if _base(name) == CONFIG_NAME]
    config = _only_adapter(configs, members)
    if config is None:
        problem = _several(configs) if configs else _no_config(members)
        return Selection(taken={}, skipped=(), problems=(problem,))
    folder = PurePosixPath(config).parent
    beside = [_base(name) for name in members if PurePosixPath(name).parent == folder]
    weights, problems = _weights(beside)
    if not weights and not problems:
        problems = (missing_weights_text(members, folder=folder),)
    taken = {config: CONFIG_NAME} | {str(folder / name): name for name in weights}
    skipped = tuple(name for name in members if name not in taken)
    return Selection(taken=taken, skipped=skipped, problems=problems)


def _weights(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose the weight files among those of one folder; problems if it isn't clear which."""
    shards = find_shards(names)
    if WEIGHTS_NAME not in names:
        index = [INDEX_NAME] if INDEX_NAME in names and shards.names else []
        return (*shards.names, *index), shards.problems
    if shards.names:
        return (), (
            f"both {WEIGHTS_NAME} and shards of it ({shards.names[0]}, …) are here, and which is "
            "meant isn't guessed: leave out one of them",
        )
    return (WEIGHTS_NAME,), ()


def _only_adapter(configs: Sequence[str], members: Iterable[str]) -> str | None:
    """Return the config of the one adapter that is meant, if there is no doubt."""
    if len(configs) < 2:
        return configs[0] if configs else None
    top = min(configs, key=lambda name: len(PurePosixPath(name).parts))
    folder = PurePosixPath(top).parent
    others = [PurePosixPath(name).parent for name in configs if name != top]
    # Weights of any kind, usable or not.
    weighty = {
        PurePosixPath(name).parent for name in members if _base(name).startswith("adapter_model")
    }
    is_alone = folder in weighty and weighty.isdisjoint(others)
    return top if is_alone and all(folder in other.parents for other in others) else None


def _lookalike_text(name: str) -> str | None:
    """Say so if a name is a needed one but for case, width or characters that can't be seen."""
    base = _base(name)
    if base in (CONFIG_NAME, WEIGHTS_NAME):
        return None
    seen = unicodedata.normalize("NFKC", _ESCAPED.sub("", base)).casefold().strip()
    for needed in (CONFIG_NAME, WEIGHTS_NAME):
        if seen == needed:
            return f"{base[:120]!r} isn't quite {needed}, and which file is meant isn't guessed"
    return None


def missing_weights_text(members: Sequence[str], *, folder: PurePosixPath) -> str:
    """Say that the weights are missing, what was looked for, and what was found instead."""
    beside = [name for name in members if PurePosixPath(name).parent == folder]
    pickles = [
        _base(n)
        for n in beside
        if _base(n).startswith(("adapter_model.", "adapter_model-"))
        and n.endswith(_PICKLE_SUFFIXES)
    ]
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is opened, so it isn't read: "
            "load the adapter with PEFT and save it again with "
            f"save_pretrained(..., safe_serialization=True), which writes {WEIGHTS_NAME}"
        )
    if any(_base(name).endswith("adapters.safetensors") for name in beside):
        return (
            "adapters.safetensors is MLX-LM's file, not PEFT's: its matrices are transposed. "
            f"Convert the adapter to PEFT's format and upload {WEIGHTS_NAME}"
        )
    shards = [_base(name) for name in beside if _is_shard(_base(name))]
    if shards:
        return (
            f"the weights are cut into shards, and {shards[0]} is the only part of them here or "
            f"has an unusual name: upload all shards, or save the adapter into one {WEIGHTS_NAME}"
        )
    return _kind_words(members, beside, folder)


def _kind_words(members: Sequence[str], beside: Sequence[str], folder: PurePosixPath) -> str:
    archives = [name for name in members if name.lower().endswith(_ARCHIVE_SUFFIXES)]
    if archives:
        return (
            f"the weights are missing, and archives inside an upload aren't opened: if "
            f"{archives[0]} holds {WEIGHTS_NAME}, unpack it and upload the files"
        )
    elsewhere = [name for name in members if _base(name) == WEIGHTS_NAME]
    if elsewhere:
        return (
            f"{WEIGHTS_NAME} lies in another folder ({elsewhere[0]}) than {CONFIG_NAME}: put "
            "both into one"
        )
    others = [_base(name) for name in beside if _base(name) != CONFIG_NAME]
    found = f"; beside it: {_shown(others)}" if others else ""
    return (
        f"the weights are missing: {CONFIG_NAME} is here, but there is no {WEIGHTS_NAME} in the "
        f"same folder{found}. Weights are often kept apart (a release, a drive, Git LFS): put "
        f"{WEIGHTS_NAME} beside the config and upload both"
    )


def _no_config(members: Sequence[str]) -> str:
    if not members:
        return f"the upload is empty: it takes {CONFIG_NAME} and {WEIGHTS_NAME}"
    archives = [name for name in members if name.lower().endswith(_ARCHIVE_SUFFIXES)]
    if archives:
        return (
            f"there is no {CONFIG_NAME}, and archives inside an upload aren't opened: unpack "
            f"{archives[0]} and upload what is in it"
        )
    return f"{CONFIG_NAME} is missing; found: {_shown(members)}"


def _several(configs: Sequence[str]) -> str:
    folders = [str(PurePosixPath(name).parent) for name in configs]
    return (
        f"the upload holds {len(configs)} adapters ({_shown(folders)}), and none is guessed: "
        "upload one of these folders alone"
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(name[:80] for name in names[:6]) + more


def _is_shard(name: str) -> bool:
    return name.startswith("adapter_model") and (
        name.endswith(".safetensors.index.json")
        or (name.endswith(".safetensors") and "-of-" in name)
    )


def _base(name: str) -> str:
    return PurePosixPath(name).name
