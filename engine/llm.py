"""The engine without a server: prompts in, completions out, in this process.

llm = LLM(model="path/to/checkpoint", dtype="fp32")
llm.load_adapter("pirate@1a2b3c4d5e6f", "examples/adapters/pirate")
llm.generate(["Hello"], SamplingParams(max_tokens=16), lora_ids=["pirate@1a2b3c4d5e6f"])
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import Tokenizer

from engine.assembly import build_core, load_for
from engine.config import EngineConfig
from engine.errors import AdapterRefused, EngineError
from engine.protocol import (
    AddRequest,
    CallDone,
    CallFailed,
    Command,
    CoreStatus,
    Event,
    LoadAdapter,
    RequestFailed,
    SamplingParams,
    SequenceOutput,
    StepDone,
    TokenLogprob,
    UnloadAdapter,
)


@dataclass(slots=True, kw_only=True)
class Completion:
    """One answer to one prompt.

    logprobs         one entry per token when asked for: the sampled token first, then the top ones
    prompt_logprobs  of sample 0, when asked for: None for the first token, then as logprobs
    """

    prompt_ids: list[int]
    sample_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    text: str = ""
    finish_reason: str | None = None
    num_cached_tokens: int = 0


class LLM:
    """One engine core in this process, stepped by whoever calls generate().

    Not for two threads at once. Use as a context manager, or call close().
    """

    def __init__(
        self,
        model: str,
        *,
        state_dir: str | None = None,
        progress: Callable[[str], None] = lambda _text: None,
        **settings: Any,
    ) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="loraplex-") if not state_dir else None
        directory = state_dir or (self._scratch.name if self._scratch else "")
        self.config = EngineConfig(model=model, state_dir=directory, **settings)
        self.loaded = load_for(self.config, progress=progress)
        self.core, self.memory = build_core(self.config, self.loaded, progress=progress)
        self.tokenizer = Tokenizer.from_file(str(self.loaded.model_dir / "tokenizer.json"))
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def load_adapter(self, lora_id: str, path: str | Path) -> None:
        """Make a PEFT directory known as `lora_id`; raises AdapterRefused with every problem."""
        call_id = f"call-{next(self._ids)}"
        self._call(LoadAdapter(call_id=call_id, lora_id=lora_id, path=str(path)))

    def unload_adapter(self, lora_id: str) -> None:
        """Forget `lora_id`; raises UnknownAdapter's words if there is none."""
        self._call(UnloadAdapter(call_id=f"call-{next(self._ids)}", lora_id=lora_id))

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        lora_ids: Sequence[str | None] | None = None,
        cache_salt: str = "",
    ) -> list[Completion]:
        """Answer all prompts in one continuous batch, in the order given.

        A prompt with n samples has n completions, one behind the other. Raises EngineError with
        the first refusal's words; the other requests are then aborted.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        loras = [None] * len(prompts) if lora_ids is None else list(lora_ids)
        open_samples: dict[tuple[str, int], Completion] = {}
        completions: list[Completion] = []
        for prompt, one, lora_id in zip(prompts, each, loras, strict=True):
            prompt_ids = self.encode(prompt) if isinstance(prompt, str) else prompt
            request_id = f"request-{next(self._ids)}"
            for sample_index in range(one.n):
                completion = Completion(prompt_ids=prompt_ids, sample_index=sample_index)
                completions.append(completion)
                open_samples[request_id, sample_index] = completion
            command = AddRequest(
                request_id=request_id,
                prompt_ids=prompt_ids,
                params=one,
                lora_id=lora_id,
                cache_salt=cache_salt,
            )
            self._take(self.core.handle(command), open_samples)
        while open_samples:
            self._take(self.core.step(), open_samples)
        for completion in completions:
            completion.text = self.tokenizer.decode(completion.token_ids)
        return completions

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with what the tokenizer adds by itself."""
        return list(self.tokenizer.encode(text).ids)

    def status(self) -> CoreStatus:
        """Return the core's counters and gauges."""
        return self.core.status()

    def close(self) -> None:
        """End the loader process and remove the scratch folder, if there is one."""
        self.core.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _take(self, events: list[Event], open_samples: dict[tuple[str, int], Completion]) -> None:
        for event in events:
            if isinstance(event, RequestFailed):
                for request_id, _sample_index in open_samples:
                    self.core.scheduler.abort(request_id)
                raise EngineError(f"{event.code}: {event.message}")
            if isinstance(event, StepDone):
                for output in event.outputs:
                    self._take_output(output, open_samples)

    def _take_output(
        self, output: SequenceOutput, open_samples: dict[tuple[str, int], Completion]
    ) -> None:
        key = output.request_id, output.sample_index
        completion = open_samples[key]
        completion.token_ids += output.token_ids
        completion.logprobs += output.logprobs or []
        completion.prompt_logprobs = output.prompt_logprobs or completion.prompt_logprobs
        completion.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            completion.finish_reason = output.finish_reason
            del open_samples[key]

    def _call(self, command: Command) -> None:
        events = self.core.handle(command)
        while True:
            for event in events:
                if isinstance(event, CallFailed):
                    if event.problems:
                        raise AdapterRefused(event.problems)
                    raise EngineError(f"{event.code}: {event.message}")
                if isinstance(event, CallDone):
                    return
            if self.core.is_waiting_for_files:
                time.sleep(0.001)
            events = self.core.step()
