"""All choices of one HTTP request, while the core works on them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import AddRequest, SamplingParams
from engine.server.choice import Choice, Delta, TextRules
from engine.server.core_supervisor import RunningCore
from engine.server.flight import Flight
from engine.server.identifiers import new_id
from engine.server.openai_responses import PromptDetails, Usage
from engine.server.origin import Origin
from engine.server.prompt_echo import PromptEcho

# A prompt with more logprobs is written in a thread, so that others' streams go on.
_MAX_SCORED_INLINE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt, which becomes one core request and `params.n` choices."""

    prompt_ids: list[int]
    params: SamplingParams
    rules: TextRules
    echo: PromptEcho | None = None


class Generation:
    """Merges the deltas of one or more core requests, in the order in which they arrive.

    The choices of one prompt follow each other. Whoever got it closes it, which aborts in the
    core whatever has not finished.
    """

    def __init__(
        self, flight: Flight, choices: Sequence[Sequence[Choice]], *, jobs: Sequence[Job]
    ) -> None:
        self._flight = flight
        self._choices = choices  # of each job, its samples
        self._prompt_lengths = [len(job.prompt_ids) for job in jobs]
        self.choices = tuple(choice for samples in choices for choice in samples)
        self.first_at_s: float | None = None
        self._first: Delta | None = None
        self._num_open = len(self.choices)

    async def wait_for_first(self, timeout_s: float) -> None:
        """Wait until something has arrived, or `timeout_s` are over.

        Raises what failed the request, so that it can be answered by a status.
        """
        self._first = await self.next_delta(timeout_s)

    @property
    def is_over(self) -> bool:
        """Tell whether every choice has ended, and `next_delta` has told so."""
        return self._num_open == 0 and self._first is None

    @property
    def has_delta(self) -> bool:
        """Tell whether the next delta is there already."""
        return self._first is not None or self._flight.has_output

    def usage(self) -> Usage:
        """What has been used so far. A prompt counts once, however many samples it has."""
        num_prompt_tokens = sum(self._prompt_lengths)
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        num_cached = sum(
            min(length, max(choice.num_cached_tokens for choice in samples))
            for length, samples in zip(self._prompt_lengths, self._choices, strict=True)
        )
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=num_cached),
        )

    def close(self) -> None:
        """Abort what is open. Never waits; safe to call again."""
        self._flight.close()

    async def next_delta(self, timeout_s: float | None = None) -> Delta | None:
        """Return what comes next before it is over, or None after a silence of `timeout_s`."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        arrival = await self._flight.next_output(timeout_s)
        if arrival is None:
            return None
        if self.first_at_s is None:
            self.first_at_s = time.monotonic()
        number, output = arrival
        choice = self._choices[number][output.sample_index]
        if len(output.prompt_logprobs or ()) > _MAX_SCORED_INLINE:
            delta = await asyncio.to_thread(choice.take, output)
        else:
            delta = choice.take(output)
        if delta.finish_reason is not None:
            self._num_open -= 1
            self._flight.finish(number, output.sample_index)
        return delta


def start_generation(
    core: RunningCore, jobs: Sequence[Job], *, lora_id: str | None, origin: Origin
) -> Generation:
    """Hand the prompts to the core, one core request each. The caller closes the generation."""
    requests, choices = [], []
    index = 0
    for job in jobs:
        request = AddRequest(
            request_id=new_id(),
            prompt_ids=job.prompt_ids,
            params=job.params,
            lora_id=lora_id,
            cache_salt=origin.cache_salt,
            tenant=origin.tenant,
            priority=origin.priority,
        )
        requests.append(request)
        places = range(index, index + job.params.n)
        tokenizer = core.model.tokenizer
        choices.append([Choice(place, tokenizer, job.rules, echo=job.echo) for place in places])
        index = places.stop
    return Generation(core.client.submit(requests), choices, jobs=jobs)
