"""An unload ends within its deadline, whoever holds the adapter."""

import time

import pytest

from engine.assembly import build_core, load_for
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import (
    AddRequest,
    CallDone,
    CallFailed,
    Event,
    LoadAdapter,
    RequestFailed,
    SamplingParams,
    StepDone,
    UnloadAdapter,
)
from tests.end_to_end.peft_reference import save_random_adapter, save_tiny_llama

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the tiny base and one adapter."""
    root = tmp_path_factory.mktemp("unload")
    save_tiny_llama(root / "base")
    save_random_adapter(root / "base", root / "a", seed=0, r=8, target_modules="all-linear")
    return root


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Loaded:
    """A core on a clock of ours with adapter a loaded; requests under way."""

    def __init__(self, world, state_dir) -> None:
        self.clock = Clock()
        config = EngineConfig(
            model=str(world / "base"),
            state_dir=str(state_dir),
            dtype="fp32",
            num_threads=1,
            kernels="torch",
            memory_bytes=32 * 1024**2,
            max_model_len=64,
            max_num_seqs=2,
        )
        loaded = load_for(config, progress=lambda _text: None)
        self.core: EngineCore
        self.core, _ = build_core(config, loaded, progress=lambda _text: None, clock=self.clock)
        self._path = str(world / "a")
        self.events: list[Event] = []
        self.load("load")
        self.step_until(lambda: self.is_done("load"))

    def load(self, call_id: str) -> None:
        self.events += self.core.handle(LoadAdapter(call_id=call_id, lora_id="a", path=self._path))

    def is_done(self, call_id: str) -> bool:
        return CallDone(call_id=call_id) in self.events

    def ask(self, *request_ids: str, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for request_id in request_ids:
            self.events += self.core.handle(
                AddRequest(request_id=request_id, prompt_ids=PROMPT, params=params, lora_id="a")
            )

    def unload(self, *, timeout_s: float, call_id: str = "unload") -> None:
        self.events += self.core.handle(
            UnloadAdapter(call_id=call_id, lora_id="a", timeout_s=timeout_s)
        )

    def unload_again(self) -> None:
        self.unload(timeout_s=5.0, call_id="unload again")
        self.step_until(lambda: self.is_done("unload again"))

    def step_until(self, condition) -> None:
        give_up_s = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < give_up_s, "the condition never came true"
            self.events += self.core.step()

    @property
    def is_unloaded(self) -> bool:
        return self.is_done("unload")

    def finish_reasons(self) -> dict[str, str]:
        """The finish reasons of requests that ended by themselves, the codes of the others."""
        ended = {}
        for event in self.events:
            if isinstance(event, RequestFailed):
                assert event.status == 409
                ended[event.request_id] = event.code
            elif isinstance(event, StepDone):
                for output in event.outputs:
                    if output.finish_reason is not None:
                        ended[output.request_id] = output.finish_reason
        return ended


@pytest.fixture
def loaded(world, tmp_path):
    loaded = Loaded(world, tmp_path)
    try:
        yield loaded
        loaded.core.check_invariants()
        status = loaded.core.status()
        assert status.adapters == []
        assert status.num_free_blocks == status.num_blocks
        assert status.free_lora_rows == status.lora_rows
        assert list(tmp_path.rglob("*.arena")) == []
    finally:
        loaded.core.close()


def test_unload_refuses_queued_requests_at_once_and_lets_running_ones_finish(loaded):
    loaded.ask("running 1", "running 2", max_tokens=20)
    loaded.step_until(lambda: loaded.core.scheduler.num_running == 2)
    loaded.ask("queued 1", "queued 2", max_tokens=20)

    loaded.unload(timeout_s=5.0)

    assert loaded.finish_reasons() == dict.fromkeys(["queued 1", "queued 2"], "adapter_unloaded")
    loaded.step_until(lambda: loaded.is_unloaded)
    assert loaded.finish_reasons() == {
        **dict.fromkeys(["queued 1", "queued 2"], "adapter_unloaded"),
        **dict.fromkeys(["running 1", "running 2"], "length"),
    }


def test_unload_ends_running_requests_at_its_deadline(loaded):
    loaded.ask("running 1", "running 2", max_tokens=60)
    loaded.step_until(lambda: loaded.core.scheduler.num_running == 2)
    loaded.unload(timeout_s=5.0)

    loaded.clock.now_s = 4.9
    for _ in range(3):
        loaded.events += loaded.core.step()
    assert not loaded.is_unloaded
    assert loaded.finish_reasons() == {}

    loaded.clock.now_s = 5.0
    loaded.events += loaded.core.step()
    assert loaded.is_unloaded
    assert loaded.finish_reasons() == dict.fromkeys(["running 1", "running 2"], "adapter_unloaded")


def test_unload_with_a_request_for_an_adapter_that_has_no_rows_yet_ends(loaded):
    """The only request is queued, and its adapter's rows are being filled: both go."""
    loaded.ask("queued", max_tokens=20)
    loaded.unload(timeout_s=5.0)

    loaded.step_until(lambda: loaded.is_unloaded)

    assert loaded.finish_reasons() == {"queued": "adapter_unloaded"}


def test_adapter_can_be_loaded_again_as_soon_as_its_unload_is_answered(loaded):
    """What the unload still has to clean up is not taken for what is loaded anew."""
    loaded.ask("running", max_tokens=60)
    loaded.step_until(lambda: loaded.core.scheduler.num_running == 1)
    loaded.unload(timeout_s=5.0)
    loaded.clock.now_s = 5.0
    loaded.events += loaded.core.step()
    assert loaded.is_unloaded

    loaded.load("load again")
    loaded.step_until(lambda: loaded.is_done("load again"))
    loaded.ask("again", max_tokens=3)
    loaded.step_until(lambda: "again" in loaded.finish_reasons())

    assert loaded.finish_reasons()["again"] == "length"
    loaded.core.check_invariants()
    loaded.unload_again()


def test_load_right_behind_an_unload_is_not_unloaded_with_it(loaded):
    loaded.unload(timeout_s=5.0)
    loaded.load("load again")

    loaded.step_until(lambda: loaded.is_unloaded and loaded.is_done("load again"))

    assert [one.lora_id for one in loaded.core.status().adapters] == ["a"]
    loaded.core.check_invariants()
    loaded.unload_again()


def test_unload_waits_for_a_load_that_is_under_way(loaded):
    """Else the version would be known for ever, though nobody may name it."""
    loaded.unload(timeout_s=5.0)
    loaded.step_until(lambda: loaded.is_unloaded)
    loaded.load("load again")

    loaded.unload_again()

    assert loaded.is_done("load again")


def test_unload_gives_up_on_a_load_that_outlasts_its_deadline(loaded):
    loaded.unload(timeout_s=5.0)
    loaded.step_until(lambda: loaded.is_unloaded)
    loaded.load("load again")

    loaded.unload(timeout_s=0.0, call_id="too soon")
    loaded.step_until(lambda: any(isinstance(event, CallFailed) for event in loaded.events))

    (failure,) = [event for event in loaded.events if isinstance(event, CallFailed)]
    assert (failure.call_id, failure.status) == ("too soon", 409)
    loaded.step_until(lambda: loaded.is_done("load again"))
    loaded.unload_again()
