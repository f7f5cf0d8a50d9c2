"""The loop on which our servers run."""

import asyncio
import gc
import os
import sys

import pytest

from adapters import event_loop, time_slices


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    time_slices.take_turns_as_usual()


async def name_of_loop() -> str:
    return type(asyncio.get_running_loop()).__module__


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop for Windows")
def test_loop_is_uvloop():
    assert event_loop.run(name_of_loop()) == "uvloop"


def test_loop_is_asyncios_own_without_uvloop(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)

    assert event_loop.run(name_of_loop()).startswith("asyncio")


def test_what_was_imported_is_left_to_stay():
    event_loop.run(name_of_loop())

    assert gc.get_freeze_count() > 0


def test_what_main_raises_comes_through():
    async def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        event_loop.run(fail())


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has one policy only")
def test_the_loop_waits_for_busy_threads():
    async def policy() -> int:
        return os.sched_getscheduler(0)

    assert event_loop.run(policy()) == os.SCHED_BATCH
    time_slices.take_turns_as_usual()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
