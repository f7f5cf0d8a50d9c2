"""What the core still owes to one HTTP request, and when it is told to stop."""

import anyio
import pytest

from engine.protocol import SequenceOutput
from engine.server.errors import CoreReported
from engine.server.flight import Flight

pytestmark = pytest.mark.anyio


def output(request_id: str, sample_index: int, finish_reason: str | None = None) -> SequenceOutput:
    return SequenceOutput(
        request_id=request_id, token_ids=[1], sample_index=sample_index, finish_reason=finish_reason
    )


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
def flight(forgotten: list[str]) -> Flight:
    return Flight({"a": 2, "b": 1}, forget=forgotten.append)


async def arrivals(flight: Flight) -> list[tuple[int, int]]:
    found = []
    while (arrival := await flight.next_output(0.0)) is not None:
        number, what = arrival
        found.append((number, what.sample_index))
    return found


async def test_a_request_is_over_when_all_its_samples_are(flight, forgotten):
    assert not flight.deliver(output("a", 1, "stop"))
    assert not flight.deliver(output("a", 0))
    assert flight.deliver(output("a", 0, "length"))
    assert not flight.expects("a")
    assert flight.expects("b")
    assert await arrivals(flight) == [(0, 1), (0, 0), (0, 0)]
    assert forgotten == []


async def test_a_sample_that_nobody_reads_is_dropped_and_its_sibling_goes_on(flight, forgotten):
    flight.finish(0, 1)
    for index in (0, 1):
        flight.deliver(output("a", index))
    assert await arrivals(flight) == [(0, 0)]
    assert forgotten == []
    flight.finish(0, 0)
    assert forgotten == ["a"]


async def test_close_forgets_what_is_open_once(flight, forgotten):
    flight.deliver(output("b", 0, "stop"))
    flight.close()
    flight.close()
    assert forgotten == ["a"]
    assert await arrivals(flight) == []


async def test_an_error_of_one_sample_ends_its_siblings(flight, forgotten):
    assert flight.deliver(output("a", 1, "error"))
    assert forgotten == ["a"]
    with pytest.raises(CoreReported):
        await flight.next_output()
    assert flight.deliver(output("b", 0, "error"))
    assert forgotten == ["a"], "b had no sibling that runs on"


async def test_an_error_of_what_nobody_reads_is_no_error(flight):
    flight.deliver(output("b", 0, "error"))
    flight.finish(1, 0)
    with anyio.fail_after(5):
        assert await arrivals(flight) == []
