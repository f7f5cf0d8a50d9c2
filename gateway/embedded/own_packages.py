"""Whether the package called `adapters` is ours: PyPI has another one of that name."""

from importlib import metadata, util
from pathlib import Path

from gateway.embedded.errors import ServeRefused


def refuse_foreign_adapters() -> None:
    """Raise ServeRefused if importing `adapters` would give, or was mixed with, another package."""
    problem = find_problem()
    if problem is not None:
        raise ServeRefused(
            f"{problem}; install Loraplex in an environment of its own: python3 -m venv .venv && "
            ".venv/bin/pip install loraplex"
        )


def find_problem() -> str | None:
    """What is wrong with `adapters` in this environment, without importing it."""
    ours = Path(__file__).parents[2] / "adapters"
    spec = util.find_spec("adapters")
    if spec is None or spec.origin is None:
        return "the package `adapters` of Loraplex is missing"
    if Path(spec.origin).parent.resolve() != ours.resolve():
        return "the package `adapters` found here isn't Loraplex's, but another of the same name"
    try:
        other = metadata.distribution("adapters")
    except metadata.PackageNotFoundError:
        return None
    if Path(str(other.locate_file("adapters"))).resolve() == ours.resolve():
        return "the distribution `adapters` (AdapterHub) has written over Loraplex's package"
    return None
