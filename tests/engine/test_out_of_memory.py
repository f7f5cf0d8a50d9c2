"""A device that has too little memory: words at start, an end in words while serving."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from engine import assembly
from engine.assembly import build_core
from engine.config import EngineConfig
from engine.errors import InvalidModel
from engine.model import loading
from engine.model.loading import load_model
from engine.model.out_of_memory import allocating
from engine.protocol import (
    AddRequest,
    Command,
    CoreFailed,
    CoreProgress,
    CoreReady,
    Event,
    SamplingParams,
)
from tests.engine.model.checkpoints import random_model, save

MIB = 1 << 20
SHORTAGE = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB."
)


def run_out(*_: Any, **__: Any) -> None:
    raise SHORTAGE


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    base = save(random_model("llama2"), tmp_path / "tiny-llama")
    return EngineConfig(
        model=str(base), state_dir=str(tmp_path), num_threads=1, kernels="torch", dtype="fp32"
    )


def refusal(config: EngineConfig) -> str:
    with pytest.raises(InvalidModel) as caught:
        build_core(
            config,
            load_model(config, progress=lambda _text: None),
            progress=lambda _text: None,
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("module", "name", "what", "remedy"),
    [
        (loading, "build_decoder", "the weights", "serve a smaller model"),
        (assembly, "_activation_bytes", "a step of 512 tokens", "lower --max-tokens-per-step"),
        (assembly, "_arena", "adapters (", "lower --memory"),
    ],
)
def test_what_has_no_room_at_start_is_named_with_the_flag(
    monkeypatch: pytest.MonkeyPatch,
    config: EngineConfig,
    module: Any,
    name: str,
    what: str,
    remedy: str,
) -> None:
    monkeypatch.setattr(module, name, run_out)
    words = refusal(config)
    assert words.startswith(f"no room for {what}")
    assert "when 2.50 GiB were asked for" in words
    assert words.endswith(remedy)


def test_kv_blocks_that_have_no_room_are_named_with_their_size(
    monkeypatch: pytest.MonkeyPatch, config: EngineConfig
) -> None:
    """All the blocks: the few that the measured step needs have found theirs."""
    made: Callable[..., Any] = assembly.KVStorage

    def storage(*, num_blocks: int, **rest: Any) -> Any:
        return run_out() if num_blocks > 100 else made(num_blocks=num_blocks, **rest)

    monkeypatch.setattr(assembly, "KVStorage", storage)
    words = refusal(config)
    assert words.startswith("no room for KV blocks (")
    assert words.endswith("lower --memory")


def test_on_cuda_it_says_what_the_device_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda asked: (700 * MIB, 81000 * MIB) if asked == device else pytest.fail("another one"),
    )
    with (
        pytest.raises(InvalidModel) as caught,
        allocating("KV blocks", device=device, num_bytes=5000 * MIB, remedy="lower --memory"),
    ):
        run_out()
    assert str(caught.value) == (
        "no room for KV blocks (5000 MiB): cuda:1 ran out of memory when 2.50 GiB were asked for; "
        "700 of 81000 MiB are free; lower --memory"
    )


def test_other_failures_are_left_as_they_are() -> None:
    with (
        pytest.raises(RuntimeError, match="an illegal memory access"),
        allocating("KV blocks", device=torch.device("cpu"), remedy="lower --memory"),
    ):
        raise RuntimeError("an illegal memory access")


# Runs engine.core_process after PATCH, which decides where the memory runs out.
CORE = """
import torch
from engine import assembly, core_process
from engine.core import EngineCore
def run_out(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
{patch}
core_process.main()
"""


class Core:
    """A core's process, and the sockets of the server that it thinks it has."""

    def __init__(self, process: "subprocess.Popen[str]", commands: Any, events: Any) -> None:
        self.process = process
        self._commands = commands
        self._events = events

    def send(self, command: Command) -> None:
        self._commands.send(msgspec.msgpack.encode(command))

    def next_event(self) -> Event:
        """The next event that is more than progress; the test's timeout is the limit."""
        while True:
            event = msgspec.msgpack.decode(self._events.recv(), type=Event)
            if not isinstance(event, CoreProgress):
                return event

    def last_words(self) -> str:
        """Wait for its end, with its standard input still open; return what it logged."""
        self.process.wait()
        assert self.process.stderr is not None
        return self.process.stderr.read()


@contextmanager
def started(config: EngineConfig, patch: str, folder: Path) -> Iterator[Core]:
    commands_address, events_address = f"ipc://{folder}/c", f"ipc://{folder}/e"
    settings = msgspec.json.encode(config).decode()
    arguments = ["--commands", commands_address, "--events", events_address, "--config", settings]
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as commands,
        context.socket(zmq.PULL) as events,
    ):
        commands.linger = 0
        commands.bind(commands_address)
        events.bind(events_address)
        process = subprocess.Popen(
            [sys.executable, "-c", CORE.format(patch=patch), *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:  # closes its pipes
            try:
                yield Core(process, commands, events)
            finally:
                process.kill()


@pytest.mark.slow
def test_a_core_that_can_not_start_says_so_to_its_server(
    config: EngineConfig, tmp_path: Path
) -> None:
    with started(config, "assembly._arena = run_out", tmp_path) as core:
        failed = core.next_event()
        log = core.last_words()
    assert isinstance(failed, CoreFailed)
    assert failed.message.startswith("no room for adapters")
    assert core.process.returncode == 1
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_step_that_runs_out_ends_the_core_with_a_line_for_the_operator(
    config: EngineConfig, tmp_path: Path
) -> None:
    """An end is what the server waits for: it fails the requests and starts another core."""
    with started(config, "EngineCore._compute = run_out", tmp_path) as core:
        assert isinstance(core.next_event(), CoreReady)
        core.send(
            AddRequest(
                request_id="one",
                prompt_ids=[5, 6, 7],
                params=SamplingParams(max_tokens=2),
                lora_id=None,
            )
        )
        log = core.last_words()
    assert core.process.returncode == 1
    assert "a step failed: cpu ran out of memory when 2.50 GiB were asked for; lower" in log
    assert "Traceback" not in log
