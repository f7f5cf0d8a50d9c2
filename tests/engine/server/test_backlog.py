"""What is queued, in tokens, and how long a refused client is told to wait."""

import pytest

from engine.protocol import AddRequest, SamplingParams, SequenceOutput
from engine.server.backlog import (
    FIRST_USUAL_ANSWER,
    MAX_WAIT_S,
    MIN_WAIT_S,
    UNKNOWN_WAIT_S,
    Backlog,
)


class Clock:
    """Time that moves when it is told to."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Scene:
    def __init__(self) -> None:
        self.clock = Clock()
        self.backlog = Backlog(clock=self.clock)

    def add(self, name: str, *, num_prompt: int = 100, max_tokens: int = 50, n: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, n=n)
        self.backlog.add(AddRequest(request_id=name, prompt_ids=[1] * num_prompt, params=params))
        self.backlog.check_invariants()

    def bring(self, name: str, num_tokens: int, *, num_cached: int = 0) -> None:
        self.backlog.bring(
            SequenceOutput(
                request_id=name, token_ids=[1] * num_tokens, num_cached_tokens=num_cached
            )
        )
        self.backlog.check_invariants()

    def end(self, name: str) -> None:
        self.backlog.end(name)
        self.backlog.check_invariants()

    def serve(self, name: str, *, after_s: float, num_prompt: int = 100, num_tokens: int) -> None:
        """Answer a whole request in one go, `after_s` from now."""
        self.add(name, num_prompt=num_prompt)
        self.clock.now_s += after_s
        self.bring(name, num_tokens)
        self.end(name)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_request_waits_until_it_begins_to_answer(scene):
    scene.add("a", num_prompt=100, max_tokens=50, n=2)
    scene.add("b", num_prompt=7, max_tokens=3)
    assert scene.backlog.num_waiting_tokens == 200 + 10

    scene.bring("a", 1)
    assert scene.backlog.num_waiting_tokens == 10
    scene.end("b")
    scene.end("b")
    assert scene.backlog.num_waiting_tokens == 0
    scene.end("a")


def test_wait_is_the_queue_over_the_rate(scene):
    """100 prompt and 20 answer tokens in 2 s: 60 a second."""
    scene.serve("a", after_s=2.0, num_tokens=20)
    scene.add("b", num_prompt=580, max_tokens=20)

    assert scene.backlog.wait_s() == pytest.approx(600 / 60)


def test_cached_tokens_are_no_work(scene):
    """40 computed and 20 answered in 1 s: 60 a second again."""
    scene.add("a")
    scene.clock.now_s += 1.0
    scene.bring("a", 20, num_cached=60)
    scene.add("b", num_prompt=600, max_tokens=20)

    assert scene.backlog.wait_s() == pytest.approx(620 / 60)


def test_idle_time_slows_nothing_down(scene):
    scene.serve("a", after_s=2.0, num_tokens=20)
    scene.clock.now_s += 1000.0
    scene.add("b", num_prompt=580, max_tokens=20)

    assert scene.backlog.wait_s() == pytest.approx(10.0)


def test_a_step_that_takes_long_counts_before_it_has_ended(scene):
    scene.serve("a", after_s=2.0, num_tokens=20)
    scene.add("b", num_prompt=580, max_tokens=20)
    scene.clock.now_s += 2.0

    assert scene.backlog.wait_s() == pytest.approx(20.0)


def test_what_was_long_ago_is_forgotten(scene):
    scene.serve("slow", after_s=100.0, num_tokens=20)
    for number in range(60):
        scene.serve(f"fast {number}", after_s=1.0, num_tokens=20)
    scene.add("b", num_prompt=580, max_tokens=20)

    assert scene.backlog.wait_s() == pytest.approx(600 / 120, rel=0.05)


def test_an_answer_counts_as_long_as_answers_have_been(scene):
    """A client that sets no max_tokens asks for all of the context, and hardly ever gets it."""
    scene.add("a", num_prompt=100, max_tokens=8000)
    assert scene.backlog.num_waiting_tokens == 100 + FIRST_USUAL_ANSWER
    scene.end("a")
    for number in range(400):
        scene.serve(f"{number}", after_s=1.0, num_tokens=20)

    scene.add("b", num_prompt=100, max_tokens=8000)

    assert scene.backlog.num_waiting_tokens == 121


def test_samples_are_answers_each(scene):
    for number in range(400):
        scene.add(f"{number}", max_tokens=8000, n=4)
        scene.bring(f"{number}", 80)
        scene.end(f"{number}")

    scene.add("b", num_prompt=100, max_tokens=8000, n=2)

    assert scene.backlog.num_waiting_tokens == 100 + 2 * 21


def test_wait_is_never_silly(scene):
    assert scene.backlog.wait_s() == UNKNOWN_WAIT_S
    scene.serve("a", after_s=2.0, num_tokens=20)
    assert scene.backlog.wait_s() == MIN_WAIT_S
    scene.add("b", num_prompt=10**6)
    assert scene.backlog.wait_s() == MAX_WAIT_S
