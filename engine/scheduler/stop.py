"""When a sequence ends by itself."""

from engine.sequence import FinishReason, Sequence


def is_stop_token(seq: Sequence, token_id: int) -> bool:
    """Whether `token_id` ends `seq`: a stop id of the request, or the model's own end."""
    if token_id in seq.params.stop_token_ids:
        return True
    return token_id in seq.eos_token_ids and not seq.params.ignore_eos


def find_finish_reason(seq: Sequence, *, max_model_len: int) -> FinishReason | None:
    """Return why `seq` ends with its last token, or None if it goes on.

    An end token that is also the last one allowed counts as the end token.
    """
    if is_stop_token(seq, seq.token_ids[-1]):
        return FinishReason.STOP
    if seq.num_generated_tokens >= seq.params.max_tokens or seq.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
