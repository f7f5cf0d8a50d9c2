"""How much service each tenant's use of each adapter has had: virtual token counters."""

from collections import Counter

from engine.sequence import Sequence

Share = tuple[str, str | None]  # tenant, lora_id

# What a token costs: one of a prompt is computed once, beside many others; one of an answer is
# computed and drawn in a step of its own.
PROMPT_TOKEN_COST = 1
ANSWER_TOKEN_COST = 2

_MIN_IDLE_SHARES = 64


def share_of(seq: Sequence) -> Share:
    """Return whose service `seq` takes."""
    return seq.tenant, seq.lora_id


class ShareCounters:
    """Counts service, so that whoever had least is next. Only FairQueue writes.

    A share is active while it has a request that waits or runs. One that becomes active is lifted
    to the least served active one: having been away earns nothing. An idle share's counter is kept
    while it is above that, so that leaving and coming back doesn't wipe it out.
    """

    def __init__(self) -> None:
        self._served: dict[Share, int] = {}
        self._num_requests: Counter[Share] = Counter()

    @property
    def num_shares(self) -> int:
        """Shares of which anything is remembered."""
        return len(self._served.keys() | self._num_requests.keys())

    @property
    def num_requests(self) -> int:
        """Requests that have joined and not left."""
        return self._num_requests.total()

    def __getitem__(self, share: Share) -> int:
        return self._served.get(share, 0)

    def join(self, share: Share) -> None:
        """Count a new request of `share`."""
        if self._num_requests and share not in self._num_requests:
            self._served[share] = max(self[share], self._floor())
        self._num_requests[share] += 1

    def leave(self, share: Share) -> None:
        """Count the end of a request of `share`."""
        assert self._num_requests[share] > 0, f"{share} has no request"
        self._num_requests[share] -= 1
        if self._num_requests[share] == 0:
            del self._num_requests[share]
        self._forget_idle()

    def charge(self, share: Share, cost: int) -> None:
        """Add to what `share` has had."""
        self._served[share] = self[share] + cost

    def check_invariants(self) -> None:
        """Check that nobody is counted who isn't there, and that the idle ones stay few."""
        assert min(self._num_requests.values(), default=1) > 0, "a share without requests is active"
        if not self._num_requests:
            assert not self._served, "an idle engine remembers who was served"

    def _floor(self) -> int:
        return min(self[share] for share in self._num_requests)

    def _forget_idle(self) -> None:
        """Drop the counters that a lift would replace, once they are many."""
        if not self._num_requests:
            self._served.clear()
        elif len(self._served) > 2 * len(self._num_requests) + _MIN_IDLE_SHARES:
            floor = self._floor()
            self._served = {
                share: served
                for share, served in self._served.items()
                if share in self._num_requests or served > floor
            }
