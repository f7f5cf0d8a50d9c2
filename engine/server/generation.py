"""All choices of one HTTP request, while the core works on them."""

import time
from collections.abc import AsyncIterator, Sequence

from engine.protocol import AddRequest, SamplingParams
from engine.server.choice import Choice, Delta
from engine.server.core_supervisor import RunningCore
from engine.server.flight import Flight
from engine.server.identifiers import new_id
from engine.server.openai_responses import PromptDetails, Usage


class Generation:
    """Merges the deltas of one or more core requests, in the order in which they arrive.

    Whoever got it closes it, which aborts in the core whatever has not finished.
    """

    def __init__(
        self, flight: Flight, choices: Sequence[Choice], *, num_prompt_tokens: int
    ) -> None:
        self._flight = flight
        self.choices = tuple(choices)
        self.num_prompt_tokens = num_prompt_tokens
        self.first_at_s: float | None = None
        self._first: Delta | None = None

    async def wait_for_first(self, timeout_s: float) -> None:
        """Wait until something has arrived, or `timeout_s` are over.

        Raises what failed the request, so that it can be answered by a status.
        """
        self._first = await self._next(timeout_s)

    async def deltas(self, ping_after_s: float | None = None) -> AsyncIterator[Delta | None]:
        """Yield deltas until every choice has ended, and None after each silence."""
        if self._first is not None:
            yield self._first
        while any(choice.finish_reason is None for choice in self.choices):
            yield await self._next(ping_after_s)

    def usage(self) -> Usage:
        """What has been used so far."""
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        num_cached = sum(choice.num_cached_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=self.num_prompt_tokens + num_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=num_cached),
        )

    def close(self) -> None:
        """Abort what is open. Never waits; safe to call again."""
        self._flight.close()

    async def _next(self, timeout_s: float | None) -> Delta | None:
        arrival = await self._flight.next_output(timeout_s)
        if arrival is None:
            return None
        if self.first_at_s is None:
            self.first_at_s = time.monotonic()
        index, output = arrival
        delta = self.choices[index].take(output)
        if delta.finish_reason is not None:
            self._flight.abort(index)
        return delta


def start_generation(
    core: RunningCore,
    *,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    lora_id: str | None,
    stops: Sequence[str],
) -> Generation:
    """Hand the prompts to the core, one core request each. The caller closes the generation."""
    requests = [
        AddRequest(request_id=new_id(), prompt_ids=prompt, params=sampling, lora_id=lora_id)
        for prompt, sampling in zip(prompts, params, strict=True)
    ]
    choices = [Choice(index, core.model.tokenizer, stops) for index in range(len(requests))]
    num_prompt_tokens = sum(map(len, prompts))
    return Generation(core.client.submit(requests), choices, num_prompt_tokens=num_prompt_tokens)
