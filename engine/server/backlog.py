"""What the core has been asked for and hasn't begun to answer, and how long that takes it."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass

from engine.protocol import AddRequest, SequenceOutput

MIN_WAIT_S = 1.0
MAX_WAIT_S = 60.0
# Before anything has been computed there is no rate.
UNKNOWN_WAIT_S = 5.0
# How far back the rate and the usual length of an answer look.
RATE_WINDOW_S = 10.0
ANSWERS_WINDOW = 32
# Until answers have shown their length; who sets no max_tokens asks for all of the context.
FIRST_USUAL_ANSWER = 256.0


@dataclass(slots=True, kw_only=True)
class _Counted:
    """One request; num_answer_tokens of all its samples, None while it waits."""

    num_prompt_tokens: int
    num_samples: int
    num_queued_tokens: int
    num_answer_tokens: int | None = None


class Backlog:
    """Counts the tokens of requests without an answer so far, and the rate at which tokens come.

    A request counts its prompt and what answers have been long of late, up to its max_tokens. The
    rate has prompt and answer tokens alike, over the time in which there was something to do.
    Only CoreClient writes; a request that has begun to answer is none of the queue's.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: dict[str, _Counted] = {}
        self._usual_answer = FIRST_USUAL_ANSWER
        # Tokens and the seconds that they took; both fade with those seconds.
        self._num_recent_tokens = 0.0
        self._recent_s = 0.0
        self._noted_at_s = 0.0
        self.num_waiting_tokens = 0

    def add(self, request: AddRequest) -> None:
        """Count a request that has been sent to the core."""
        if not self._requests:
            self._noted_at_s = self._clock()
        num_prompt_tokens, num_samples = len(request.prompt_ids), request.params.n
        answer = min(request.params.max_tokens, math.ceil(self._usual_answer))
        counted = _Counted(
            num_prompt_tokens=num_prompt_tokens,
            num_samples=num_samples,
            num_queued_tokens=num_prompt_tokens + num_samples * answer,
        )
        self._requests[request.request_id] = counted
        self.num_waiting_tokens += counted.num_queued_tokens

    def bring(self, output: SequenceOutput) -> None:
        """Take what the core has computed; of a request that has ended, nothing."""
        counted = self._requests.get(output.request_id)
        if counted is None:
            return
        num_tokens = len(output.token_ids)
        if counted.num_answer_tokens is None:
            counted.num_answer_tokens = 0
            self.num_waiting_tokens -= counted.num_queued_tokens
            self._note(max(0, counted.num_prompt_tokens - output.num_cached_tokens))
        counted.num_answer_tokens += num_tokens
        self._note(num_tokens)

    def end(self, request_id: str) -> None:
        """Forget a request, however it has ended. Safe to call again."""
        counted = self._requests.pop(request_id, None)
        if counted is None:
            return
        if counted.num_answer_tokens is None:
            self.num_waiting_tokens -= counted.num_queued_tokens
        else:
            answer = counted.num_answer_tokens / counted.num_samples
            self._usual_answer += (answer - self._usual_answer) / ANSWERS_WINDOW

    @property
    def request_ids(self) -> Set[str]:
        """Requests that have not ended."""
        return self._requests.keys()

    def wait_s(self) -> float:
        """Estimate how long what is queued now will take, within MIN_WAIT_S and MAX_WAIT_S."""
        if self._num_recent_tokens == 0:
            return UNKNOWN_WAIT_S
        # A step that takes long counts before it has ended.
        taken_s = self._recent_s + (self._clock() - self._noted_at_s)
        wait_s = self.num_waiting_tokens * taken_s / self._num_recent_tokens
        return min(max(wait_s, MIN_WAIT_S), MAX_WAIT_S)

    def check_invariants(self) -> None:
        """What is queued is the sum of what waits."""
        waiting = [one for one in self._requests.values() if one.num_answer_tokens is None]
        assert self.num_waiting_tokens == sum(one.num_queued_tokens for one in waiting)

    def _note(self, num_tokens: int) -> None:
        now_s = self._clock()
        taken_s, self._noted_at_s = now_s - self._noted_at_s, now_s
        fade = math.exp(-taken_s / RATE_WINDOW_S)
        self._num_recent_tokens = self._num_recent_tokens * fade + num_tokens
        self._recent_s = self._recent_s * fade + taken_s
