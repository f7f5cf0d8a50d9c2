"""The definition of the LoRA products, in plain torch; every other back end is compared with it."""

from torch import Tensor

from punica_kernels.arena import Arena
from punica_kernels.plan import LoraPlan


def lora_shrink(
    x: Tensor, *, arena: Arena, module: str, layer: int, plan: LoraPlan
) -> dict[tuple[int, int], Tensor]:
    """Project every token that carries an adapter into its adapter's rank space.

        v[segment, slice] = x[rows of segment] @ a[slice, row0 : row0 + rank].T

    x  [num_tokens, in]; tokens outside the plan's segments are not read

    Returns fp32 [tokens of the segment, rank] by segment number and slice; a slice without weights
    is left out.
    """
    v: dict[tuple[int, int], Tensor] = {}
    for number, segment in enumerate(plan.segments):
        rows = x[segment.start : segment.stop].float()
        for part in arena.weights(module, layer, segment.lora_index).slices:
            v[number, part.slice_index] = rows @ part.a_t.float()
    return v


def lora_expand(
    y: Tensor,
    v: dict[tuple[int, int], Tensor],
    *,
    arena: Arena,
    module: str,
    layer: int,
    plan: LoraPlan,
) -> None:
    """Add every adapter's part to the module's output, in place.

        y[rows of segment, columns of slice] += scale * v[segment, slice] @ b[span, columns]

    y  [num_tokens, out]; in fp32 up to the last rounding to y's dtype. Other elements are neither
       read nor written.
    """
    spec = arena.module(module)
    for number, segment in enumerate(plan.segments):
        for part in arena.weights(module, layer, segment.lora_index).slices:
            column0 = spec.column0(part.slice_index)
            columns = slice(column0, column0 + part.b.shape[1])
            place = y[segment.start : segment.stop, columns]
            delta = part.scale * (v[number, part.slice_index] @ part.b.float())
            place.copy_(place.float() + delta)


def add_lora_embedding(y: Tensor, token_ids: Tensor, *, arena: Arena, plan: LoraPlan) -> None:
    """Add every adapter's part to the embeddings of its tokens, in place.

        y[t] += scale * a[span, token_ids[t]] @ b[span]            for the tokens t of each segment

    y  [num_tokens, hidden], token_ids [num_tokens]; in fp32 up to the last rounding to y's dtype.

    The product with a one-hot row is a lookup, so nothing is computed over the vocabulary.
    """
    for segment in plan.segments:
        rows = slice(segment.start, segment.stop)
        for part in arena.weights("embedding", 0, segment.lora_index).slices:
            v = part.a_t[token_ids[rows]].float()  # [tokens of the segment, rank]
            place = y[rows]
            place.copy_(place.float() + part.scale * (v @ part.b.float()))


def add_lora(
    y: Tensor, x: Tensor, *, arena: Arena, module: str, layer: int, plan: LoraPlan
) -> None:
    """Shrink, then expand: y += scale * (x a.T) b for each segment. Shapes as above."""
    v = lora_shrink(x, arena=arena, module=module, layer=layer, plan=plan)
    lora_expand(y, v, arena=arena, module=module, layer=layer, plan=plan)
