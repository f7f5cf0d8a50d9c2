"""What attention needs to know of one sequence's rows in a step."""

from collections.abc import Sequence
from typing import Protocol


class AttentionChunk(Protocol):
    """One sequence's rows in the step.

    context_len   tokens of the sequence that its last row sees, this chunk included
    block_table   the sequence's block ids; at least context_len tokens long
    """

    @property
    def row0(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def context_len(self) -> int: ...
    @property
    def block_table(self) -> Sequence[int]: ...
