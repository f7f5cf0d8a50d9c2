"""What the samples of a step look like to whoever asked for them."""

from engine.protocol import SequenceOutput, TokenLogprob
from engine.scheduler.plan import SampledToken
from engine.sequence import FinishReason, Sequence


def token_output(
    seq: Sequence, sampled: SampledToken, reason: FinishReason | None
) -> SequenceOutput:
    """Return what a drawn token brings to one sample; `reason` if it ends with it."""
    assert sampled.token_id is not None
    return SequenceOutput(
        request_id=seq.request_id,
        sample_index=seq.sample_index,
        token_ids=[sampled.token_id],
        logprobs=None if sampled.logprobs is None else [sampled.logprobs],
        prompt_logprobs=_prompt_logprobs(seq),
        finish_reason=None if reason is None else reason.value,
        stop_token_id=sampled.token_id if reason is FinishReason.STOP else None,
        num_cached_tokens=seq.num_cached_tokens,
    )


def error_output(seq: Sequence) -> SequenceOutput:
    """Return the end of a sample for which nothing could be drawn."""
    return SequenceOutput(
        request_id=seq.request_id,
        sample_index=seq.sample_index,
        token_ids=[],
        finish_reason=FinishReason.ERROR.value,
        num_cached_tokens=seq.num_cached_tokens,
        error_code="logits_not_finite",
        error="the model's output for this request is not a number",
    )


def _prompt_logprobs(seq: Sequence) -> list[list[TokenLogprob] | None] | None:
    """Return those of the whole prompt with the first token of sample 0, else None."""
    is_first = seq.sample_index == 0 and seq.num_generated_tokens == 1
    if seq.params.num_prompt_logprobs is None or not is_first:
        return None
    return [None, *seq.prompt_logprobs]
