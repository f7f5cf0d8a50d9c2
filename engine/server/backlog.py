"""What the core has been asked for and hasn't begun to answer, and how long that takes it."""

import math
from collections.abc import Callable, Set

from engine.protocol import AddRequest, SequenceOutput

MIN_WAIT_S = 1.0
MAX_WAIT_S = 60.0
# Before anything has been computed there is no rate.
UNKNOWN_WAIT_S = 5.0
# How far back the rate and the usual length of an answer look.
RATE_WINDOW_S = 10.0
ANSWERS_WINDOW = 32


class Backlog:
    """Counts the tokens of requests without an answer so far, and the rate at which tokens come.

    A request counts its prompt and what answers have been long of late, up to its max_tokens. The
    rate has prompt and answer tokens alike, over the time in which there was something to do.
    Only CoreClient writes; a request that has begun to answer is none of the queue's.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[str, int] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_answer_tokens: dict[str, int] = {}
        self._usual_answer: float | None = None
        # Tokens and the seconds that they took; both fade with those seconds.
        self._num_recent_tokens = 0.0
        self._recent_s = 0.0
        self._noted_at_s = 0.0
        self.num_waiting_tokens = 0

    def add(self, request: AddRequest) -> None:
        """Count a request that has been sent to the core."""
        if not self._num_prompt_tokens:
            self._noted_at_s = self._clock()
        num_prompt_tokens = len(request.prompt_ids)
        answer = request.params.max_tokens
        if self._usual_answer is not None:
            answer = min(answer, math.ceil(self._usual_answer))
        self._num_prompt_tokens[request.request_id] = num_prompt_tokens
        self._waiting[request.request_id] = num_prompt_tokens + answer * request.params.n
        self.num_waiting_tokens += self._waiting[request.request_id]

    def bring(self, output: SequenceOutput) -> None:
        """Take what the core has computed for a request that hasn't ended."""
        request_id = output.request_id
        if request_id not in self._num_prompt_tokens:
            return
        num_tokens = len(output.token_ids)
        if request_id in self._waiting:
            self.num_waiting_tokens -= self._waiting.pop(request_id)
            self._num_answer_tokens[request_id] = 0
            num_tokens += max(0, self._num_prompt_tokens[request_id] - output.num_cached_tokens)
        self._num_answer_tokens[request_id] += len(output.token_ids)
        self._note(num_tokens)

    def end(self, request_id: str) -> None:
        """Forget a request, however it has ended. Safe to call again."""
        self.num_waiting_tokens -= self._waiting.pop(request_id, 0)
        self._num_prompt_tokens.pop(request_id, None)
        answer = self._num_answer_tokens.pop(request_id, None)
        if answer is None:
            return
        if self._usual_answer is None:
            self._usual_answer = answer
        self._usual_answer += (answer - self._usual_answer) / ANSWERS_WINDOW

    @property
    def request_ids(self) -> Set[str]:
        """Requests that have not ended."""
        return self._num_prompt_tokens.keys()

    def wait_s(self) -> float:
        """Estimate how long what is queued now will take, within MIN_WAIT_S and MAX_WAIT_S."""
        if self._num_recent_tokens == 0:
            return UNKNOWN_WAIT_S
        # A step that takes long counts before it has ended.
        taken_s = self._recent_s + (self._clock() - self._noted_at_s)
        wait_s = self.num_waiting_tokens * taken_s / self._num_recent_tokens
        return min(max(wait_s, MIN_WAIT_S), MAX_WAIT_S)

    def check_invariants(self) -> None:
        """Every request waits or has begun to answer, and the sum is that of its parts."""
        assert self.num_waiting_tokens == sum(self._waiting.values())
        assert not self._waiting.keys() & self._num_answer_tokens.keys()
        known = self._waiting.keys() | self._num_answer_tokens.keys()
        assert known == self._num_prompt_tokens.keys()

    def _note(self, num_tokens: int) -> None:
        now_s = self._clock()
        taken_s, self._noted_at_s = now_s - self._noted_at_s, now_s
        fade = math.exp(-taken_s / RATE_WINDOW_S)
        self._num_recent_tokens = self._num_recent_tokens * fade + num_tokens
        self._recent_s = self._recent_s * fade + taken_s
