"""What can go wrong in a worker, by who must act.

EngineError
├── InvalidRequest       the caller: a field is wrong; `param` names it
│   └── ContextLengthExceeded
├── InvalidModel         the operator: this checkpoint can't be served; says what can
├── UnknownAdapter       the caller's view is old: load it, or use another name
├── AdapterConflict      the caller's view is old: another version has the name
├── AdapterRefused       the adapter's author: every problem is listed
├── Overloaded           try later; `retry_after_s` says when
└── CoreBroken           the operator: the core's process ended or can't start
"""

from collections.abc import Sequence


class EngineError(Exception):
    """Base of every error that a worker reports on purpose; `code` goes on the wire."""

    code = "internal_error"
    status = 500
    param: str | None = None


class InvalidRequest(EngineError):
    """A request field has a value that can't be served."""

    code = "invalid_request"
    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt plus max_tokens, is longer than the model's context."""

    code = "context_length_exceeded"

    def __init__(self, *, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"this model's context is {max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens} and {max_tokens} more were asked for",
            param="messages",
        )


class InvalidModel(EngineError):
    """The checkpoint is of a kind that this engine doesn't serve."""

    code = "unsupported_model"
    status = 400


class UnknownAdapter(EngineError):
    """No adapter of that lora_id is known to this worker."""

    code = "model_not_found"
    status = 404
    param = "model"


class AdapterConflict(EngineError):
    """The adapter is being unloaded, or its name is taken by another version."""

    code = "adapter_unloaded"
    status = 409


class AdapterRefused(EngineError):
    """The adapter can't be applied exactly; `problems` lists every reason."""

    code = "invalid_adapter"
    status = 422

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Overloaded(EngineError):
    """Too much is queued; the same request may succeed after `retry_after_s`."""

    code = "overloaded"
    status = 429

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CoreBroken(EngineError):
    """The engine core's process has ended; the server is starting it again."""

    code = "engine_unavailable"
    status = 503
