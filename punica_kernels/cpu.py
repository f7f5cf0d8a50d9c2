"""The plain CPU back end: per segment two products for each slice, never a gather per token."""

import torch
from torch import Tensor

from punica_kernels.arena import Arena, ModuleWeights
from punica_kernels.plan import LoraPlan


def add_lora(
    y: Tensor, x: Tensor, *, arena: Arena, module: str, layer: int, plan: LoraPlan
) -> None:
    """Add every adapter's part to the module's output, in place.

        y[t, columns of slice] += scale * (x[t] @ a[slice, span].T) @ b[span, columns]

    x  [num_tokens, in], y [num_tokens, out]; both may be views. Tokens before the first segment and
       after the last aren't read or written; those between segments keep their value.

    All arithmetic is fp32. In bf16 an adapter's rows are widened as they are read, once per segment
    and not per token, and y is rounded once at the end, as the definition has it. That is also the
    fast way: a small bf16 product costs the matrix library about ten times what an fp32 one does.
    """
    lengths, adapters = _runs(plan)
    work = [
        (number, weights)
        for number, lora_index in enumerate(adapters)
        if lora_index is not None and (weights := arena.weights(module, layer, lora_index)).slices
    ]
    if not work:
        return
    start, stop = plan.segments[0].start, plan.segments[-1].stop
    place = y[start:stop]
    wide_y = place.float()  # fp32: `place` itself
    x_runs = x[start:stop].float().split_with_sizes(lengths)
    slices = arena.module(module).slice_out_features
    y_runs = [part.split_with_sizes(lengths) for part in wide_y.split_with_sizes(slices, dim=1)]
    add_run = _add_run if arena.dtype is torch.float32 else _add_run_widened
    for number, weights in work:
        add_run([runs[number] for runs in y_runs], x_runs[number], weights)
    if wide_y is not place:
        place.copy_(wide_y)


def _runs(plan: LoraPlan) -> tuple[list[int], list[int | None]]:
    """Return lengths and adapters of the runs from the first segment to the last.

    A gap between two segments is a run without adapter.
    """
    lengths: list[int] = []
    adapters: list[int | None] = []
    end = plan.segments[0].start
    for segment in plan.segments:
        if segment.start > end:
            lengths.append(segment.start - end)
            adapters.append(None)
        lengths.append(segment.num_tokens)
        adapters.append(segment.lora_index)
        end = segment.stop
    return lengths, adapters


def _add_run(y_slices: list[Tensor], x: Tensor, weights: ModuleWeights) -> None:
    """Add one adapter's part to a run of tokens; everything is fp32 already.

    y_slices  one [num_tokens of the run, out of the slice] per slice of the module, views of y
    x         [num_tokens of the run, in]
    """
    for part in weights.slices:
        v = x.mm(part.a_t)  # [num_tokens, rank]
        y_slices[part.slice_index].addmm_(v, part.b, alpha=part.scale)


def _add_run_widened(y_slices: list[Tensor], x: Tensor, weights: ModuleWeights) -> None:
    """Do what _add_run does, with weights in bf16; y_slices and x are fp32.

    Where all slices have the same rank, widening leaves them side by side, so that one product
    shrinks for all of them. (In fp32 that would need a copy that costs more than it saves.)
    """
    if weights.stacked_a is None or weights.stacked_b is None:
        for part in weights.slices:
            v = x.mm(part.a_t.float())  # [num_tokens, rank]
            y_slices[part.slice_index].addmm_(v, part.b.float(), alpha=part.scale)
        return
    v = x.mm(weights.stacked_a.float().flatten(0, 1).t())  # [num_tokens, num_slices * rank]
    widths = [part.b.shape[1] for part in weights.slices]
    b_slices = weights.stacked_b.float().split_with_sizes(widths, dim=1)
    v_slices = v.split_with_sizes([part.rank for part in weights.slices], dim=1)
    for part, v_slice, b in zip(weights.slices, v_slices, b_slices, strict=True):
        y_slices[part.slice_index].addmm_(v_slice, b, alpha=part.scale)
