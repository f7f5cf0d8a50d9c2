"""Only processes that are provably ours are ended."""

import subprocess
import sys
from contextlib import contextmanager

from gateway.embedded.leftovers import (
    ChildRecord,
    describe,
    end_leftovers,
    read_records,
    write_records,
)

IGNORING = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WAITING = "print('up', flush=True); import sys; sys.stdin.read()"


@contextmanager
def running(code: str):
    """A process in a group of its own, as our children are; its code is its marker."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout.readline() == b"up\n"
        try:
            yield process
        finally:
            process.kill()


def test_leftover_is_ended_and_forgotten(folder):
    with running(WAITING) as process:
        record = describe(name="worker-0", pid=process.pid, marker="sys.stdin.read()")
        write_records(folder.pids_file, [record])

        assert end_leftovers(folder.pids_file) == [record]

        assert process.wait(timeout=10) < 0
    assert not folder.pids_file.exists()


def test_leftover_that_ignores_sigterm_is_killed(folder, monkeypatch):
    monkeypatch.setattr("gateway.embedded.leftovers.END_TIMEOUT_S", 0.1)
    with running(IGNORING + WAITING) as process:
        record = describe(name="worker-0", pid=process.pid, marker="SIG_IGN")
        write_records(folder.pids_file, [record])

        end_leftovers(folder.pids_file)

        assert process.wait(timeout=10) == -9


def test_process_with_another_command_is_left_alone(folder):
    with running(WAITING) as process:
        record = describe(name="valkey", pid=process.pid, marker="valkey-server")
        write_records(folder.pids_file, [record])

        assert end_leftovers(folder.pids_file) == []

        assert process.poll() is None


def test_process_that_has_the_pid_since_later_is_left_alone(folder):
    with running(WAITING) as process:
        record = ChildRecord(
            name="worker-0", pid=process.pid, marker="sys.stdin.read()", started="an earlier time"
        )
        write_records(folder.pids_file, [record])

        assert end_leftovers(folder.pids_file) == []

        assert process.poll() is None


def test_records_that_cannot_be_read_mean_no_leftovers(folder):
    folder.pids_file.write_text('[{"name": "worker-0", "pi')

    assert read_records(folder.pids_file) == []
    assert end_leftovers(folder.pids_file) == []
