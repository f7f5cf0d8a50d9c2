"""`python -m engine.core_process`: one engine core, alone in its interpreter.

Takes commands from and sends events to a worker's server over two zmq sockets that the server has
bound. Ends when the server does: its standard input reaches end-of-file.
"""

import argparse
import logging
import os
import sys
import threading

import msgspec
import torch
import zmq

from adapters import time_slices
from engine.assembly import build_core, describe, load_for
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineError
from engine.model.out_of_memory import describe_shortage
from engine.protocol import Command, CoreFailed, CoreProgress, Event

logger = logging.getLogger("loraplex.core")

IDLE_POLL_MS = 1000
FILES_POLL_MS = 5
STEP_REMEDY = "lower --memory, --max-tokens-per-step or --max-num-seqs"


class EventSender:
    """Sends events as msgpack; one message each."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, event: Event) -> None:
        """Queue one event; zmq's own thread carries it over."""
        self._socket.send(self._encoder.encode(event))

    def progress(self, text: str) -> None:
        """Send one start-up step in words."""
        self.send(CoreProgress(text=text))


class CommandReceiver:
    """Receives commands in order."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def receive(self, *, timeout_ms: int) -> list[Command]:
        """Return all commands that are there, waiting at most `timeout_ms` for a first one."""
        commands: list[Command] = []
        while self._socket.poll(timeout_ms if not commands else 0):
            commands.append(self._decoder.decode(self._socket.recv()))
        return commands


def serve(core: EngineCore, receiver: CommandReceiver, sender: EventSender) -> None:
    """Step for ever. A step that fails ends the process: the server then starts another core.

    Where the device's memory ran out, a line for the operator says so in place of a traceback.
    """
    try:
        while True:
            take_turn(core, receiver, sender)
    except torch.OutOfMemoryError as error:
        shortage = describe_shortage(error, core.runner.device)
        logger.critical("a step failed: %s; %s", shortage, STEP_REMEDY)
        sys.exit(1)


def take_turn(core: EngineCore, receiver: CommandReceiver, sender: EventSender) -> None:
    """Take what has arrived, compute one step, send what it brought."""
    if not core.has_work:
        timeout_ms = IDLE_POLL_MS
    elif core.is_waiting_for_files:
        timeout_ms = FILES_POLL_MS
    else:
        timeout_ms = 0
    for command in receiver.receive(timeout_ms=timeout_ms):
        for event in core.handle(command):
            sender.send(event)
    for event in core.step():
        sender.send(event)


def main() -> None:
    """Load the model, say that it is ready, and serve until the server is gone."""
    parser = argparse.ArgumentParser(prog="engine.core_process", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--commands", required=True, help="zmq address to connect to")
    parser.add_argument("--events", required=True, help="zmq address to connect to")
    arguments = parser.parse_args()
    time_slices.take_turns_as_usual()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    context = zmq.Context()
    events = context.socket(zmq.PUSH)
    events.set_hwm(0)
    events.connect(arguments.events)
    commands = context.socket(zmq.PULL)
    commands.connect(arguments.commands)
    sender, receiver = EventSender(events), CommandReceiver(commands)
    try:
        config = msgspec.json.decode(arguments.config.encode(), type=EngineConfig)
        loaded = load_for(config, progress=sender.progress)
        core, split = build_core(config, loaded, progress=sender.progress)
    except (EngineError, msgspec.ValidationError, ValueError) as error:
        code = error.code if isinstance(error, EngineError) else "invalid_configuration"
        sender.send(CoreFailed(message=str(error), code=code))
        commands.close(linger=0)  # term waits for every socket
        events.close(linger=2000)
        context.term()
        sys.exit(1)
    sender.send(describe(config, loaded, split, core))
    serve(core, receiver, sender)


def _exit_with_parent() -> None:
    """End this process at once when the other end of its standard input is gone."""
    # Not by sys.stdin: a thread that waits in it holds its lock, and Python can't end without that.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
