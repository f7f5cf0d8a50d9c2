"""The loop on which our servers run."""

import asyncio
import gc
import sys

import pytest

from adapters import event_loop


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


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
