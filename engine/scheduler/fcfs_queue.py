"""Who is admitted next: first come, first served, with a bound on being passed over."""

from collections import OrderedDict
from collections.abc import Iterator

from engine.sequence import Sequence


class FcfsQueue:
    """The waiting sequences in the order of their arrival. Only Scheduler writes to it.

    The rule. A sequence that can't get blocks or a place stops all behind it. One whose adapter
    isn't resident yet is passed over: those behind it may start first. Each start of a later
    sequence *with an adapter* is an overtake. After `max_overtakes` of them the queue is closed
    behind the passed sequence: until it has started, no adapter's sequence behind it may start,
    so leases run out and its rows can be had. Sequences of the base need no rows; they go on.
    """

    def __init__(self, *, max_overtakes: int) -> None:
        if max_overtakes < 1:
            raise ValueError(f"max_overtakes must be at least 1, not {max_overtakes}")
        self._max_overtakes = max_overtakes
        self._sequences: OrderedDict[Sequence, None] = OrderedDict()
        self._num_overtakes: dict[Sequence, int] = {}

    @property
    def is_closed(self) -> bool:
        """Whether a sequence has been passed over so often that it holds others back."""
        return any(self._closes(seq) for seq in self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._sequences

    def push(self, seq: Sequence) -> None:
        """Add a sequence that has just arrived."""
        self._sequences[seq] = None
        self._num_overtakes[seq] = 0

    def push_front(self, seq: Sequence) -> None:
        """Add a preempted sequence: it goes on before all others."""
        self.push(seq)
        self._sequences.move_to_end(seq, last=False)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that has started or ended."""
        del self._sequences[seq]
        del self._num_overtakes[seq]

    def candidates(self) -> Iterator[Sequence]:
        """Yield sequences in the order in which they may start now.

        The caller either removes a sequence before it asks for the next one, or has passed it
        over; it stops asking when there is no room.
        """
        passed: list[Sequence] = []
        is_closed = False
        for seq in tuple(self._sequences):
            if is_closed and seq.lora_id is not None:
                continue
            yield seq
            if seq in self._sequences:
                passed.append(seq)
                is_closed = is_closed or self._closes(seq)
            elif seq.lora_id is not None:
                for other in passed:
                    self._num_overtakes[other] += 1
                is_closed = any(self._closes(other) for other in passed)

    def held_back(self) -> set[Sequence]:
        """Return the sequences that may not start because the queue is closed before them."""
        found: set[Sequence] = set()
        is_closed = False
        for seq in self._sequences:
            if is_closed and seq.lora_id is not None:
                found.add(seq)
            is_closed = is_closed or self._closes(seq)
        return found

    def _closes(self, seq: Sequence) -> bool:
        return self._num_overtakes[seq] >= self._max_overtakes
