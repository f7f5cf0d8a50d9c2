"""A worker's error answers, made fit for a client of the gateway."""

from typing import Any

from gateway.errors import GatewayError, WorkerBroken, WorkerRefused
from gateway.workers.client import WorkerAnswer

PASSED_ON = frozenset({400, 404, 409, 413, 422, 429, 503, 504})


def is_unknown_adapter(answer: WorkerAnswer) -> bool:
    """True when the worker says that it doesn't know the lora_id it was asked for."""
    return answer.status == 404 and _error_object(answer).get("code") == "model_not_found"


def as_refusal(answer: WorkerAnswer) -> GatewayError:
    """Return the error that a client sees for a worker's error answer.

    Words of OpenAI's error object are passed on; anything else is not repeated, since it could
    hold what a client must not see.
    """
    error = _error_object(answer)
    message = error.get("message")
    if answer.status not in PASSED_ON or not isinstance(message, str):
        return WorkerBroken(f"the worker answered with status {answer.status}")
    return WorkerRefused(
        status=answer.status,
        message=message,
        param=_text_or_none(error.get("param")),
        code=_text_or_none(error.get("code")) or "worker_error",
        retry_after_s=_retry_after_s(answer),
        problems=[item for item in error.get("problems") or () if isinstance(item, str)],
    )


def without_path(error: GatewayError, path: str) -> GatewayError:
    """Return the refusal of a load in words that don't say where the store is."""
    if not isinstance(error, WorkerRefused) or error.status in {400, 404}:
        return WorkerBroken("the worker can't read the adapter's files; its log says why")
    return WorkerRefused(
        status=error.status,
        message=str(error).replace(path, "the adapter's directory"),
        param=error.param,
        code=error.code,
        retry_after_s=error.retry_after_s,
        problems=[text.replace(path, "the adapter's directory") for text in error.problems],
    )


def _error_object(answer: WorkerAnswer) -> dict[str, Any]:
    document = answer.json()
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _retry_after_s(answer: WorkerAnswer) -> float | None:
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return max(0.0, float(answer.headers[name]) * scale)
        except (KeyError, ValueError):
            continue
    return 1.0 if answer.status in {429, 503} else None
