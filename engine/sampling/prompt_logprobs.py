"""Log probabilities of the tokens of prompts, gathered from the tiles of one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol import TokenLogprob
from engine.sampling.logprobs import pack_logprobs, unpack_logprobs
from engine.transfer import download, upload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """What is known of some rows of a chunk, still where it was computed."""

    position: int
    next_token_ids: Sequence[int]
    num_top: int
    packed: Tensor  # [num_rows, 1 + 2 * num_top] in fp64


class PromptLogprobs:
    """What one step says about its prompts; lives for that step only."""

    def __init__(self) -> None:
        self._tiles: list[_Tile] = []

    def add(
        self, position: int, logits: Tensor, *, next_token_ids: Sequence[int], num_top: int
    ) -> None:
        """Take logits [num_rows, vocab] of a chunk, which follow those of the last call for it.

        next_token_ids  what really came after each row
        """
        ids = upload(next_token_ids, dtype=torch.int64, device=logits.device)
        packed = pack_logprobs(logits, ids, num_top=min(num_top, logits.shape[-1]))
        self._tiles.append(
            _Tile(position=position, next_token_ids=next_token_ids, num_top=num_top, packed=packed)
        )

    def by_position(self) -> Mapping[int, Sequence[list[TokenLogprob]]]:
        """Return entries in the order of the tokens, by the position of their chunk in the plan.

        All tiles come from the device in one copy.
        """
        found: dict[int, list[list[TokenLogprob]]] = {}
        numbers_of_tiles = download([tile.packed for tile in self._tiles])
        for tile, numbers in zip(self._tiles, numbers_of_tiles, strict=True):
            found.setdefault(tile.position, []).extend(
                unpack_logprobs(row, token_id=token_id, num_top=tile.num_top)
                for row, token_id in zip(numbers, tile.next_token_ids, strict=True)
            )
        return found
