"""Drives an engine in this process step by step, and notes when each token came."""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.llm import LLM
from engine.protocol import AbortRequest, AddRequest, SamplingParams, StepDone


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request: when it was added, when its tokens came, in seconds of perf_counter."""

    num_prompt_tokens: int
    added_s: float
    token_times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    is_over: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.added_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]


class Stepper:
    """Adds greedy requests of a fixed number of tokens to an LLM and steps it."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._open: dict[str, Stream] = {}
        self._numbers = itertools.count()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def num_tokens_computed(self) -> int:
        """Tokens of the requests that have begun to answer and not ended."""
        return sum(
            stream.num_prompt_tokens + len(stream.token_times_s)
            for stream in self._open.values()
            if stream.token_times_s
        )

    def add(self, prompt_ids: list[int], *, max_tokens: int, lora_id: str | None = None) -> Stream:
        """Queue one request; its clock starts now."""
        request_id = f"bench-{next(self._numbers)}"
        stream = Stream(num_prompt_tokens=len(prompt_ids), added_s=time.perf_counter())
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        command = AddRequest(
            request_id=request_id, prompt_ids=prompt_ids, params=params, lora_id=lora_id
        )
        refusals = self.llm.core.handle(command)
        assert not refusals, refusals
        self._open[request_id] = stream
        return stream

    def abort_all(self) -> None:
        """Forget every open request."""
        for request_id in self._open:
            self.llm.core.handle(AbortRequest(request_id=request_id))
        self._open.clear()

    def step(self) -> float:
        """Compute one step; return the seconds that it took."""
        started_s = time.perf_counter()
        events = self.llm.core.step()
        now_s = time.perf_counter()
        for event in events:
            assert isinstance(event, StepDone), event
            for output in event.outputs:
                stream = self._open[output.request_id]
                stream.token_times_s += [now_s] * len(output.token_ids)
                stream.num_cached_tokens = output.num_cached_tokens
                if output.finish_reason is not None:
                    stream.is_over = True
                    del self._open[output.request_id]
        return now_s - started_s

    def run(self, *, after_each: Callable[[], None] = lambda: None) -> float:
        """Step until no request is open; return the seconds that it took."""
        started_s = time.perf_counter()
        while self._open:
            self.step()
            after_each()
        return time.perf_counter() - started_s


def random_prompt(generator: random.Random, num_tokens: int) -> list[int]:
    """Token ids of nothing in particular; special ones, at the beginning, left out."""
    return [generator.randrange(1000, 40_000) for _ in range(num_tokens)]
