"""The one door to the LoRA products: the arena's own back end, or one by where it lives."""

from torch import Tensor

from punica_kernels import cpu, reference
from punica_kernels.arena import Arena
from punica_kernels.plan import LoraPlan


def add_lora_embedding(y: Tensor, token_ids: Tensor, *, arena: Arena, plan: LoraPlan) -> None:
    """Add every adapter's part to the embeddings y [num_tokens, hidden] of its tokens, in place.

    The definition is all there is: a lookup per token and one small product per segment.
    """
    assert y.shape[0] == token_ids.shape[0] == plan.num_tokens, "the plan is this step's"
    reference.add_lora_embedding(y, token_ids, arena=arena, plan=plan)


def add_lora(
    y: Tensor, x: Tensor, *, arena: Arena, module: str, layer: int, plan: LoraPlan
) -> None:
    """Add every adapter's part to a module's output, in place.

        y[t] += scale * (x[t] @ a.T) @ b            for the tokens t of each segment

    y  [num_tokens, out of the module], may be a view; x [num_tokens, in]
    """
    assert y.shape[0] == x.shape[0] == plan.num_tokens, "the plan is this step's"
    if arena.back_end is not None:
        arena.back_end.add_once(y, x, module=module, layer=layer, plan=plan)
    elif arena.device.type == "cpu":
        cpu.add_lora(y, x, arena=arena, module=module, layer=layer, plan=plan)
    else:
        reference.add_lora(y, x, arena=arena, module=module, layer=layer, plan=plan)
