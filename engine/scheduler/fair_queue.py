"""Who is admitted next: by priority, then whoever had least; with a bound on being passed over."""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum

from engine.scheduler.shares import (
    ANSWER_TOKEN_COST,
    PROMPT_TOKEN_COST,
    Share,
    ShareCounters,
    share_of,
)
from engine.sequence import Sequence


class QueuePolicy(Enum):
    """How waiting sequences are ordered; the value is what a configuration says.

    FAIR  by priority, then by what their tenant and adapter have had, then by arrival
    FCFS  by arrival
    """

    FAIR = "fair"
    FCFS = "fcfs"


_Line = tuple[int, Share]  # priority, share
_ONE_LINE: _Line = (0, ("", None))


class FairQueue:
    """The waiting sequences, and whose turn it is. Only Scheduler writes to it.

    Preempted sequences come first. The others stand in lines, one for each priority and share, in
    the order of their arrival. The next is the head of the line with the lowest priority, then
    the least served share, then the earliest arrival.

    The rule. A sequence that can't get blocks or a place stops all behind it. One whose adapter
    isn't resident yet is passed over: those behind it may start first. Each start of a later
    sequence *with an adapter* is an overtake. After `max_overtakes` of them the queue is closed
    behind the passed sequence: until it has started, no adapter's sequence behind it may start,
    so leases run out and its rows can be had. Sequences of the base need no rows; they go on.
    """

    def __init__(self, *, policy: QueuePolicy, max_overtakes: int) -> None:
        if max_overtakes < 1:
            raise ValueError(f"max_overtakes must be at least 1, not {max_overtakes}")
        self._is_fair = policy is QueuePolicy.FAIR
        self._max_overtakes = max_overtakes
        self._shares = ShareCounters()
        self._preempted: OrderedDict[Sequence, None] = OrderedDict()
        self._lines: dict[_Line, OrderedDict[Sequence, None]] = {}
        self._arrivals: dict[Sequence, int] = {}
        self._next_arrival = itertools.count()
        # Only of sequences that were passed over at all.
        self._num_overtakes: dict[Sequence, int] = {}

    @property
    def is_closed(self) -> bool:
        """Whether a sequence has been passed over so often that it holds others back."""
        return any(self._closes(seq) for seq in self._num_overtakes)

    @property
    def num_accounts(self) -> int:
        """Requests that are charged for: those that came by push() and have not left."""
        return self._shares.num_requests

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._arrivals

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._preempted or seq in self._arrivals

    def push(self, seq: Sequence) -> None:
        """Add a request that has just arrived; it is charged for until leave() is called."""
        self._shares.join(share_of(seq))
        self._lines.setdefault(self._line_of(seq), OrderedDict())[seq] = None
        self._arrivals[seq] = next(self._next_arrival)

    def push_front(self, seq: Sequence) -> None:
        """Add a preempted sequence: it goes on before all others."""
        self._preempted[seq] = None
        self._preempted.move_to_end(seq, last=False)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that has started or ended."""
        if seq in self._preempted:
            del self._preempted[seq]
            return
        line_id = self._line_of(seq)
        line = self._lines[line_id]
        del line[seq]
        if not line:
            del self._lines[line_id]
        del self._arrivals[seq]
        self._num_overtakes.pop(seq, None)

    def charge_start(self, seq: Sequence) -> None:
        """Charge the prompt of a sequence that starts, but for what was found in the cache."""
        self._shares.charge(share_of(seq), PROMPT_TOKEN_COST * seq.num_missing_tokens)

    def charge_token(self, seq: Sequence) -> None:
        """Charge a token of an answer."""
        self._shares.charge(share_of(seq), ANSWER_TOKEN_COST)

    def leave(self, seq: Sequence) -> None:
        """End the account of the request of `seq`."""
        self._shares.leave(share_of(seq))

    def candidates(self) -> Iterator[Sequence]:
        """Yield sequences in the order in which they may start now.

        The caller either removes a sequence before it asks for the next one, or has passed it
        over; it stops asking when there is no room.
        """
        passed: list[Sequence] = []
        is_closed = False
        for seq in self._in_order():
            if is_closed and seq.lora_id is not None:
                continue
            yield seq
            if seq in self:
                passed.append(seq)
                is_closed = is_closed or self._closes(seq)
            elif seq.lora_id is not None:
                for other in passed:
                    self._num_overtakes[other] = self._num_overtakes.get(other, 0) + 1
                is_closed = any(self._closes(other) for other in passed)

    def held_back(self) -> set[Sequence]:
        """Return the sequences that may not start because the queue is closed before them."""
        found: set[Sequence] = set()
        if not self.is_closed:
            return found
        is_closed = False
        for seq in self._in_order():
            if is_closed and seq.lora_id is not None:
                found.add(seq)
            is_closed = is_closed or self._closes(seq)
        return found

    def check_invariants(self) -> None:
        """Check that every sequence stands in its one line, and that counts are of those here."""
        self._shares.check_invariants()
        standing = [seq for line in self._lines.values() for seq in line]
        assert len(standing) == len(self._arrivals), "a sequence is in two lines"
        assert set(standing) == self._arrivals.keys()
        assert not self._preempted.keys() & self._arrivals.keys()
        assert all(self._lines.values()), "an empty line is kept"
        assert self._num_overtakes.keys() <= self._arrivals.keys()
        for line_id, line in self._lines.items():
            assert all(self._line_of(seq) == line_id for seq in line)

    def _in_order(self) -> Iterator[Sequence]:
        """Yield all sequences; what is charged meanwhile counts for the rest of the order."""
        yield from tuple(self._preempted)
        # Arrivals are all different, so that two entries never compare their lines.
        heads = [
            (line[0], self._served(line), self._arrivals[next(iter(seqs))], line)
            for line, seqs in self._lines.items()
        ]
        heapq.heapify(heads)
        rests: dict[_Line, deque[Sequence]] = {}
        while heads:
            priority, served, arrival, line = heapq.heappop(heads)
            if served != self._served(line):
                heapq.heappush(heads, (priority, self._served(line), arrival, line))
                continue
            rest = rests.setdefault(line, deque())
            if not rest:
                rest.extend(self._lines[line])
            yield rest.popleft()
            if rest:
                heapq.heappush(heads, (priority, self._served(line), self._arrivals[rest[0]], line))

    def _line_of(self, seq: Sequence) -> _Line:
        return (seq.priority, share_of(seq)) if self._is_fair else _ONE_LINE

    def _served(self, line: _Line) -> int:
        return self._shares[line[1]] if self._is_fair else 0

    def _closes(self, seq: Sequence) -> bool:
        return self._num_overtakes.get(seq, 0) >= self._max_overtakes
