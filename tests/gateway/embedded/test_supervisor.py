"""Children come back when they die, and nothing is left when we end."""

import json
import os
import signal
import subprocess
import sys

import pytest
import redis.asyncio

from gateway.embedded.errors import ChildFailed
from gateway.embedded.events import ChildEnded, ChildRestarted, Progress, WorkerReady
from gateway.embedded.supervisor import Supervisor
from tests.gateway.embedded.worlds import is_alive, make_valkey, make_worker
from tests.waiting import eventually

pytestmark = pytest.mark.anyio


async def test_killed_valkey_serves_again_with_its_data(supervisor, folder, told):
    valkey = make_valkey(folder)
    await supervisor.start(valkey)
    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        await client.set("promise", "kept")
        first = await client.info("server")

    os.kill(supervisor.pids()["valkey"], signal.SIGKILL)
    restarted = await told.wait_for(ChildRestarted)

    async with redis.asyncio.Redis.from_url(valkey.url) as client:
        assert await client.get("promise") == b"kept"
        second = await client.info("server")
    assert second["run_id"] != first["run_id"]
    assert restarted.pid == supervisor.pids()["valkey"] == second["process_id"]
    assert restarted.after_s < 5


async def test_killed_worker_is_started_again_and_its_core_is_ended(supervisor, folder, told):
    await supervisor.start(make_worker(folder, report=told))
    first = told.of(WorkerReady)[0]

    os.kill(first.pid, signal.SIGKILL)
    ended = await told.wait_for(ChildEnded)
    restarted = await told.wait_for(ChildRestarted)

    assert (ended.reason, ended.retry_in_s) == ("killed by SIGKILL", 0)
    assert restarted.pid not in {first.pid, first.details["core_pid"]}
    eventually(lambda: not is_alive(first.details["core_pid"]))


async def test_worker_that_dies_again_soon_waits_longer(supervisor, folder, told):
    await supervisor.start(make_worker(folder, report=told))

    for number in (1, 2, 3):
        os.kill(supervisor.pids()["worker-0"], signal.SIGKILL)
        await told.wait_for(ChildRestarted, number=number)

    assert [event.retry_in_s for event in told.of(ChildEnded)] == [0, 0.25, 0.5]


async def test_worker_that_refuses_to_start_says_why(supervisor, folder, told):
    with pytest.raises(ChildFailed, match="worker-0 can't start: GPTQ checkpoints aren't served"):
        await supervisor.start(make_worker(folder, report=told, behaviour="refuse"))

    assert told.of(Progress) == [Progress(step="worker-0", text="loading the model")]
    assert told.of(WorkerReady) == []


async def test_worker_that_ends_without_a_word_is_quoted_from_its_log(supervisor, folder, told):
    with pytest.raises(ChildFailed) as raised:
        await supervisor.start(make_worker(folder, report=told, behaviour="crash"))

    assert "it ended with code 1: ImportError: no module named torch" in str(raised.value)
    assert "\n" not in str(raised.value)


async def test_lines_that_are_not_events_are_passed_over(supervisor, folder, told):
    await supervisor.start(make_worker(folder, report=told, behaviour="babble"))

    assert told.of(WorkerReady)[0].details["base_id"] == "tiny"


async def test_stop_ends_every_child_and_what_it_started(supervisor, folder, told):
    await supervisor.start(make_valkey(folder))
    await supervisor.start(make_worker(folder, report=told))
    pids = [*supervisor.pids().values(), told.of(WorkerReady)[0].details["core_pid"]]

    await supervisor.stop()

    eventually(lambda: not any(is_alive(pid) for pid in pids))
    assert not folder.pids_file.exists()
    assert told.of(ChildEnded) == []


async def test_child_that_ignores_sigterm_is_killed(supervisor, folder, told):
    await supervisor.start(make_worker(folder, report=told, behaviour="stubborn"))
    pid = supervisor.pids()["worker-0"]

    await supervisor.stop(timeout_s=0.2)

    assert not is_alive(pid)


async def test_pids_are_recorded_before_a_child_is_ready(folder, told):
    supervisor = Supervisor(pids_file=folder.pids_file, report=told)
    with pytest.raises(ChildFailed):
        await supervisor.start(make_worker(folder, report=told, behaviour="crash"))

    recorded = json.loads(folder.pids_file.read_bytes())

    assert [record["name"] for record in recorded] == ["worker-0"]
    await supervisor.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere leftovers are ended at next start")
def test_killed_parent_leaves_no_process(folder):
    command = [sys.executable, "-m", "tests.gateway.embedded.parent", str(folder.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        pids = json.loads(parent.stdout.readline())
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)

        parent.kill()

    eventually(lambda: not any(is_alive(pid) for pid in pids))
