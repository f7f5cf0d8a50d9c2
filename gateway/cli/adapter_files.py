"""Which files of an adapter are sent, and how."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from adapters.peft_format import INDEX_NAME as INDEX
from adapters.peft_format import WEIGHTS_NAME as WEIGHTS
from adapters.shards import find_shards
from gateway.cli.output import EXIT_USAGE, CliError

# Beside the weights, what the server may use; trainer state and the like stays here.
NEEDED_NAMES = frozenset(
    {
        "adapter_config.json",
        WEIGHTS,
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenFiles:
    """What is sent, and the names of what was left behind."""

    sent: tuple[Path, ...]
    left: tuple[str, ...]


def choose_files(paths: Sequence[Path]) -> ChosenFiles:
    """The files of one adapter: a directory's, or the files (or the one archive) themselves.

    A directory without the weights is sent as it is, because the server says best what is wrong
    with it. Raises CliError for a path that can't be read.
    """
    for path in paths:
        if not path.exists():
            raise CliError(f"there's nothing at {path}", exit_code=EXIT_USAGE)
    if len(paths) == 1 and paths[0].is_dir():
        return _choose_in(paths[0])
    directories = [str(path) for path in paths if path.is_dir()]
    if directories:
        raise CliError(
            "give one directory, or files; not both: " + ", ".join(directories),
            exit_code=EXIT_USAGE,
        )
    return ChosenFiles(sent=tuple(paths), left=())


def _choose_in(directory: Path) -> ChosenFiles:
    entries = sorted(directory.iterdir())
    files = [entry for entry in entries if entry.is_file()]
    if not files:
        raise CliError(f"there are no files in {directory}")
    names = [file.name for file in files]
    shards = find_shards(names).names
    if WEIGHTS in names or shards:
        needed = NEEDED_NAMES.union(shards, [INDEX] if shards else [])
        files = [file for file in files if file.name in needed]
    left = tuple(entry.name for entry in entries if entry not in files)
    return ChosenFiles(sent=tuple(files), left=left)


@contextmanager
def opened(files: Sequence[Path]) -> Iterator[list[tuple[str, tuple[str, BinaryIO]]]]:
    """The files as multipart parts that are read while they are sent, never whole."""
    with ExitStack() as stack:
        try:
            yield [("files", (file.name, stack.enter_context(file.open("rb")))) for file in files]
        except OSError as error:
            raise CliError(f"{error.filename} can't be read ({error.strerror})") from error
