"""One owner per state folder, a short private runtime folder, words when neither can be had."""

import os
import subprocess
import sys

import pytest

from gateway.embedded.errors import StateFolderBroken, StateFolderBusy
from gateway.embedded.state import StateFolder, default_state_dir, locked, make_private, runtime_dir

HOLD = """
import sys
from pathlib import Path
from gateway.embedded.state import StateFolder, locked
with locked(StateFolder(root=Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_owner_is_refused_with_the_first_ones_pid(folder):
    busy = pytest.raises(StateFolderBusy, match=rf"\(pid {os.getpid()}\)")
    with locked(folder), busy, locked(folder):
        pass


def test_lock_is_free_once_its_owner_was_killed(folder):
    command = [sys.executable, "-c", HOLD, str(folder.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(StateFolderBusy, match=f"pid {owner.pid}"), locked(folder):
            pass
        owner.kill()

    with locked(folder):
        pass


def test_state_folder_is_this_users_alone(folder):
    assert folder.root.stat().st_mode & 0o077 == 0


def test_state_folder_below_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(StateFolderBroken, match="choose another with --state-dir"):
        StateFolder(root=tmp_path / "file" / "state").prepare()


def test_state_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("LORAPLEX_STATE_DIR", str(tmp_path))

    assert default_state_dir() == tmp_path


def test_runtime_folder_is_the_same_in_every_run_and_different_for_another_state(folder, tmp_path):
    assert runtime_dir(folder) == runtime_dir(folder)
    assert runtime_dir(folder) != runtime_dir(StateFolder(root=tmp_path / "other"))


def test_runtime_folder_stays_short_enough_for_a_socket(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 90)))

    assert len(os.fsencode(runtime_dir(folder) / "valkey.sock")) <= 103


def test_runtime_folder_is_made_private_and_accepted_again(tmp_path):
    make_private(tmp_path / "run")
    make_private(tmp_path / "run")

    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_runtime_folder_that_others_can_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)

    with pytest.raises(StateFolderBroken, match="isn't private to you"):
        make_private(tmp_path)


def test_runtime_folder_that_is_a_link_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)

    with pytest.raises(StateFolderBroken, match="isn't private to you"):
        make_private(link)
