"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM's server answers them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.errors import InvalidRequest
from engine.server.errors import CoreReported, Forbidden, invalid
from engine.server.openai_schema import LoadAdapterRequest, UnloadAdapterRequest
from engine.server.parsing import read_body
from engine.server.worker import worker_of


async def load_adapter(request: Request) -> Response:
    """Make a version known. The same name and path again changes nothing.

    With load_inplace a version of that name is unloaded first, so its files are read again.
    """
    worker = worker_of(request)
    body = await read_body(request, LoadAdapterRequest)
    core = worker.core
    if body.lora_name == core.model.base_id:
        raise invalid("this is the base model's name", "lora_name")
    roots = worker.settings.allowed_roots
    path = await asyncio.to_thread(allowed_path, body.lora_path, roots)
    if body.load_inplace:
        try:
            await core.client.unload_adapter(body.lora_name)
        except CoreReported as problem:
            if problem.status != 404:
                raise
    await core.client.load_adapter(body.lora_name, str(path))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """Forget a version; requests that run with it get a while to finish."""
    worker = worker_of(request)
    body = await read_body(request, UnloadAdapterRequest)
    await worker.core.client.unload_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def allowed_path(path: str, roots: Sequence[str]) -> Path:
    """The directory itself, links resolved, if it lies below an allowed root.

    The refusal doesn't tell whether anything exists outside the roots.
    """
    try:
        resolved = Path(path).resolve()
        allowed = [Path(root).resolve() for root in roots]
    except (OSError, ValueError) as problem:
        raise invalid("this is not a path", "lora_path") from problem
    if not any(resolved.is_relative_to(root) for root in allowed):
        error = Forbidden("lora_path: adapters may not be read from there")
        error.param = "lora_path"
        raise error
    if not resolved.is_dir():
        raise InvalidRequest("lora_path: there is no such directory", param="lora_path")
    return resolved
