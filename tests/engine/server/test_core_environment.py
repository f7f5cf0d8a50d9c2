"""A core's process maps one OpenMP runtime, and says so in words where it can't."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import punica_kernels
from engine.model.kernel_choice import choose_kernels, openmp_runtimes
from engine.server.core_environment import SPIN_COUNT, core_environment

CHOICE = """
from engine.model.kernel_choice import choose_kernels, openmp_runtimes
choice = choose_kernels("auto", num_threads=1)
print(choice.name, len(openmp_runtimes()), choice.reason, sep="|")
"""
pytestmark = pytest.mark.slow  # processes that import torch
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="libgomp is shared on Linux")


def choice_in(environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", CHOICE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip().split("|")


def plain_environment() -> dict[str, str]:
    """Return this process's environment as it was before the test run changed it."""
    dropped = {"LD_LIBRARY_PATH", "NUMBA_THREADING_LAYER", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


@linux_only
def test_this_test_run_has_one_runtime_as_a_core_has():
    assert choose_kernels("auto", num_threads=1).name == "numba"
    assert len(openmp_runtimes()) == 1


@linux_only
def test_started_otherwise_it_falls_back_in_words():
    name, num_runtimes, reason = choice_in(plain_environment())
    if num_runtimes == "1":
        pytest.skip("torch and numba find one runtime here by themselves")
    assert name == "torch"
    assert "don't share one OpenMP runtime" in reason


@linux_only
def test_its_environment_gives_one_runtime(tmp_path: Path, monkeypatch):
    for name in set(os.environ) - set(plain_environment()):
        monkeypatch.delenv(name)
    environment = core_environment(tmp_path)
    assert choice_in(environment)[:2] == ["numba", "1"]
    assert environment["GOMP_SPINCOUNT"] == SPIN_COUNT


def test_what_the_operator_has_set_stays(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own/libraries")
    environment = core_environment(tmp_path)
    assert "GOMP_SPINCOUNT" not in environment
    assert environment["NUMBA_CACHE_DIR"] == "/somewhere"
    assert environment["LD_LIBRARY_PATH"].endswith("/own/libraries")


def test_links_are_made_again_when_torch_has_moved(tmp_path: Path):
    first = core_environment(tmp_path)
    links = list((tmp_path / "openmp").iterdir())
    for link in links:
        link.unlink()
        link.symlink_to(tmp_path / "gone")
    assert core_environment(tmp_path) == first
    assert all(link.resolve().is_file() for link in links)


def test_each_state_of_the_kernels_sources_has_a_cache_of_its_own(tmp_path: Path, monkeypatch):
    """numba looks only at the file of the kernel itself, not at those that it is made of."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    package = tmp_path / "punica_kernels"
    shutil.copytree(Path(punica_kernels.__file__).parent, package)
    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "punica_kernels" else find(name)
    )
    before = core_environment(tmp_path)["NUMBA_CACHE_DIR"]
    (package / "numba_pairs.py").write_text("# other inner loops\n")
    assert core_environment(tmp_path)["NUMBA_CACHE_DIR"] != before
