"""Every failure on the way to a server is words and an exit code."""

import json
import socket

import pytest

COMMANDS = [
    ("adapter", "ls"),
    ("adapter", "show", "pirate"),
    ("adapter", "promote", "pirate", "v1"),
    ("adapter", "rollback", "pirate"),
    ("adapter", "rm", "pirate"),
    ("ps",),
    ("chat", "-m", "hello"),
]


@pytest.fixture
def nobody():
    """An address of this machine where nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_server_is_exit_code_3_and_says_how_to_start_one(cli, nobody, command):
    done = cli(*command, "--url", nobody)

    assert done.exit_code == 3
    assert done.stdout == ""
    assert f"no Loraplex server answers at {nobody}" in done.stderr
    assert "loraplex serve" in done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_server_is_one_json_object_for_scripts(cli, nobody, command):
    done = cli(*command, "--url", nobody, "--json")

    assert done.exit_code == 3
    assert json.loads(done.stdout)["error"]["code"] == "no_server"


def test_address_without_a_scheme_is_told(cli):
    done = cli("ps", "--url", "127.0.0.1:8000")

    assert done.exit_code == 1
    assert "must begin with http://" in done.stderr


def test_another_kind_of_server_is_told(cli, server):
    server.answer("GET /v1/workers", b"<html>It works!</html>")

    done = cli("ps")

    assert done.exit_code == 1
    assert "really a Loraplex server" in done.stderr


def test_failure_without_words_is_told_with_its_status(cli, server):
    server.answer("GET /v1/workers", b"Bad Gateway", status=502)

    assert "answered 502 without saying why" in cli("ps").stderr


def test_unknown_command_is_a_usage_error(cli):
    assert cli("nonsense").exit_code == 2


def test_version_is_printed(cli):
    assert cli("--version").stdout.startswith("loraplex ")
