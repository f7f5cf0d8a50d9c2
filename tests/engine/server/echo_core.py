"""A core process without a model: it speaks engine.protocol and answers a prompt with itself.

Every step each running sample gets the next token of its own prompt, so a test writes the answer
by writing the prompt. Sample k leaves out the prompt's first k tokens. The request's seed chooses
a mishap. Other sampling parameters change nothing.
"""

import argparse
import os
import sys
import threading
from enum import IntEnum

import msgspec
import zmq

from engine.config import EngineConfig
from engine.protocol import (
    AbortRequest,
    AddRequest,
    CallDone,
    CallFailed,
    Command,
    CoreFailed,
    CoreProgress,
    CoreReady,
    CoreStatus,
    GetStatus,
    LoadAdapter,
    ModuleShape,
    ProbeAdapter,
    ProbeResult,
    RequestFailed,
    ResidentAdapter,
    SequenceOutput,
    StepDone,
    TokenLogprob,
    UnloadAdapter,
)

NUM_BLOCKS = 64
VOCAB_SIZE = 600
EOS_ID = 0


class Mishap(IntEnum):
    """What a request's seed brings about."""

    ENDLESS = 1
    CRASH_AT_ONCE = 2
    CRASH_AFTER_TWO_TOKENS = 3
    SILENCE = 4
    NONSENSE = 5
    ERROR_AFTER_TWO_TOKENS = 6
    TWO_TOKENS_A_STEP = 7
    QUEUE_IS_FULL = 8


class EchoCore:
    """Runs requests one token a step."""

    def __init__(self, push: "zmq.Socket[bytes]") -> None:
        self._push = push
        self._encoder = msgspec.msgpack.Encoder()
        self._running: dict[str, AddRequest] = {}
        self._places: dict[str, dict[int, int]] = {}  # of each sample that runs
        self._adapters: dict[str, str] = {}
        self._num_steps = 0

    def send(self, event: object) -> None:
        self._push.send(self._encoder.encode(event))

    def obey(self, command: Command) -> None:
        match command:
            case AddRequest():
                self._add(command)
            case AbortRequest():
                self._running.pop(command.request_id, None)
            case LoadAdapter():
                self._load(command)
            case UnloadAdapter():
                if self._adapters.pop(command.lora_id, None) is None:
                    self._fail(command.call_id, "model_not_found", "no such adapter", 404)
                else:
                    self.send(CallDone(call_id=command.call_id))
            case ProbeAdapter():
                self._probe(command)
            case GetStatus():
                self.send(CallDone(call_id=command.call_id, status=self._status()))

    def step(self) -> None:
        outputs = [
            self._advance(request, sample_index)
            for request in list(self._running.values())
            for sample_index in list(self._places[request.request_id])
            if request.request_id in self._running
        ]
        outputs = [output for output in outputs if output is not None]
        if outputs:
            self._num_steps += 1
            self.send(StepDone(outputs=outputs))

    def _add(self, request: AddRequest) -> None:
        if request.params.seed == Mishap.CRASH_AT_ONCE:
            os._exit(9)
        if request.params.seed == Mishap.NONSENSE:
            self._push.send(b"\xc1")
            return
        if request.params.seed == Mishap.QUEUE_IS_FULL:
            failed = RequestFailed(
                request_id=request.request_id, code="overloaded", message="full", status=429
            )
            self.send(failed)
            return
        if request.lora_id is not None and request.lora_id not in self._adapters:
            message = f"the model {request.lora_id!r} does not exist"
            failed = RequestFailed(
                request_id=request.request_id, code="model_not_found", message=message, status=404
            )
            self.send(failed)
            return
        self._running[request.request_id] = request
        self._places[request.request_id] = dict.fromkeys(range(request.params.n), 0)

    def _load(self, command: LoadAdapter) -> None:
        if os.path.basename(command.path).startswith("bad"):  # noqa: PTH119
            problems = ["q_proj: wrong shape", "k_proj: NaN"]
            self._fail(command.call_id, "invalid_adapter", "; ".join(problems), 422, problems)
        elif self._adapters.get(command.lora_id, command.path) != command.path:
            self._fail(command.call_id, "adapter_conflict", "the name is taken", 409)
        else:
            self._adapters[command.lora_id] = command.path
            self.send(CallDone(call_id=command.call_id))

    def _probe(self, command: ProbeAdapter) -> None:
        """An adapter does something unless its name says otherwise."""
        if command.lora_id not in self._adapters:
            self._fail(command.call_id, "model_not_found", "no such adapter", 404)
            return
        gap = 0.0 if command.lora_id.startswith("silent") else 1.5
        result = ProbeResult(has_effect=gap > 0, is_finite=True, logit_gap=gap, noise=0.0)
        self.send(CallDone(call_id=command.call_id, probe=result))

    def _fail(
        self, call_id: str, code: str, message: str, status: int, problems: list[str] | None = None
    ) -> None:
        failed = CallFailed(
            call_id=call_id, code=code, message=message, status=status, problems=problems or []
        )
        self.send(failed)

    def _advance(self, request: AddRequest, sample_index: int) -> SequenceOutput | None:
        seed, place = request.params.seed, self._places[request.request_id][sample_index]
        if seed == Mishap.SILENCE:
            return None
        if place >= 2 and seed == Mishap.CRASH_AFTER_TWO_TOKENS:
            os._exit(9)
        if place >= 2 and seed == Mishap.ERROR_AFTER_TWO_TOKENS:
            self._end(request.request_id, sample_index)
            return SequenceOutput(
                request_id=request.request_id,
                token_ids=[],
                sample_index=sample_index,
                finish_reason="error",
                error_code="internal_error",
                error="the step failed",
            )
        num_tokens = 2 if seed == Mishap.TWO_TOKENS_A_STEP else 1
        return self._next_tokens(request, sample_index, num_tokens)

    def _next_tokens(
        self, request: AddRequest, sample_index: int, num_tokens: int
    ) -> SequenceOutput:
        params, first = request.params, self._places[request.request_id][sample_index]
        token_ids, stop_token_id = _echo(request, sample_index, first, num_tokens)
        place = first + len(token_ids)
        finish_reason = None if stop_token_id is None else "stop"
        if finish_reason is None and params.seed != Mishap.ENDLESS and place >= params.max_tokens:
            finish_reason = "length"
        self._places[request.request_id][sample_index] = place
        if finish_reason is not None:
            self._end(request.request_id, sample_index)
        logprobs = prompt_logprobs = None
        if params.num_logprobs is not None:
            logprobs = [_logprobs(each, params.num_logprobs) for each in token_ids]
        if params.num_prompt_logprobs is not None and (first, sample_index) == (0, 0):
            prompt_logprobs = _prompt_logprobs(request)
        return SequenceOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            sample_index=sample_index,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=3,
        )

    def _end(self, request_id: str, sample_index: int) -> None:
        del self._places[request_id][sample_index]
        if not self._places[request_id]:
            del self._running[request_id]

    def _status(self) -> CoreStatus:
        lora_ids = sorted({each.lora_id for each in self._running.values() if each.lora_id})
        return CoreStatus(
            num_steps=self._num_steps,
            num_tokens_computed=0,
            num_tokens_generated=0,
            num_steps_with_several_adapters=0,
            num_steps_with_several_chunks=0,
            max_adapters_in_step=0,
            num_running_seqs=len(self._running),
            num_waiting_seqs=0,
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - len(self._running),
            lora_rows={"attention": 100},
            free_lora_rows={"attention": 100},
            running_lora_ids=lora_ids,
            waiting_lora_ids=[],
            adapters=[
                ResidentAdapter(
                    lora_id=lora_id,
                    tier="disk",
                    state="resident",
                    max_rank=8,
                    num_rows={"attention": 8},
                    num_leases=0,
                    num_claims=0,
                )
                for lora_id in self._adapters
            ],
            num_adapter_loads=0,
            num_adapter_evictions=0,
        )


def _echo(
    request: AddRequest, sample_index: int, place: int, num_tokens: int
) -> tuple[list[int], int | None]:
    """The next tokens of a sample, and the one among them that ends it."""
    text = request.prompt_ids[sample_index:]
    if request.params.seed == Mishap.ENDLESS:
        return [text[(place + n) % len(text)] for n in range(num_tokens)], None
    token_ids: list[int] = []
    for token_id in [*text, EOS_ID][place : min(place + num_tokens, request.params.max_tokens)]:
        token_ids.append(token_id)
        is_end = token_id == EOS_ID and place + len(token_ids) == len(text) + 1
        if is_end or token_id in request.params.stop_token_ids:
            return token_ids, token_id
    return token_ids, None


def _logprobs(token_id: int, num_logprobs: int, best: float = -0.5) -> list[TokenLogprob]:
    drawn = TokenLogprob(token_id, best)
    likeliest = [TokenLogprob((token_id + n) % VOCAB_SIZE, best - n) for n in range(num_logprobs)]
    return [drawn, *likeliest]


def _prompt_logprobs(request: AddRequest) -> list[list[TokenLogprob] | None]:
    """As if the n-th token of the prompt had a logprob of -n."""
    num_logprobs = request.params.num_prompt_logprobs or 0
    scored = enumerate(request.prompt_ids[1:], start=1)
    return [None, *(_logprobs(token_id, num_logprobs, -float(n)) for n, token_id in scored)]


def _ready(config: EngineConfig) -> CoreReady:
    return CoreReady(
        base_id=config.served_model_name or "tiny",
        base_identity="sha256:" + "0" * 64,
        architecture="LlamaForCausalLM",
        model_dir=config.model,
        dtype="fp32",
        vocab_size=VOCAB_SIZE,
        num_layers=2,
        hidden=8,
        max_model_len=config.max_model_len or 128,
        eos_token_ids=(EOS_ID,),
        modules={"q_proj": ModuleShape(8, 8)},
        tie_word_embeddings=True,
        lora_rows={"attention": 100},
        num_blocks=NUM_BLOCKS,
        block_size=16,
        memory={"kv": 1, "arena": 1},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--config", "--commands", "--events"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect(arguments.commands)
    push.connect(arguments.events)
    core = EchoCore(push)
    if config.model == "no-such-model":
        core.send(CoreFailed(message="no such model; try another", code="unsupported_model"))
        context.destroy(linger=1000)
        sys.exit(1)
    if config.model == "dies-at-start":
        os._exit(7)
    core.send(CoreProgress(text="reading weights"))
    if config.model == "never-ready":
        threading.Event().wait()
    core.send(_ready(config))
    decoder = msgspec.msgpack.Decoder(Command)
    while True:
        while pull.poll(2):
            core.obey(decoder.decode(pull.recv()))
        core.step()


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
