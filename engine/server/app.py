"""The worker's routes, put together."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from engine.errors import EngineError
from engine.server import adapters_routes, operator_routes, text_routes
from engine.server.chat import chat_completions
from engine.server.completions import completions
from engine.server.errors import ClientGone, on_client_gone, on_engine_error, on_http_exception
from engine.server.middleware import ClusterTokenCheck, InstanceHeader, UnforeseenErrors
from engine.server.worker import Worker

ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", operator_routes.models, methods=["GET"]),
    Route("/v1/load_lora_adapter", adapters_routes.load_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", adapters_routes.unload_adapter, methods=["POST"]),
    Route("/tokenize", text_routes.tokenize, methods=["POST"]),
    Route("/detokenize", text_routes.detokenize, methods=["POST"]),
    Route("/tokenizer_info", text_routes.tokenizer_info, methods=["GET"]),
    Route("/health", operator_routes.health, methods=["GET"]),
    Route("/metrics", operator_routes.metrics, methods=["GET"]),
    Route("/internal/status", operator_routes.internal_status, methods=["GET"]),
    Route("/internal/probe", operator_routes.internal_probe, methods=["POST"]),
    Route("/internal/base", operator_routes.internal_base, methods=["GET"]),
)


def create_app(worker: Worker) -> Starlette:
    """The ASGI application of one worker, whose core the caller starts and stops."""
    app = Starlette(
        routes=ROUTES,
        middleware=[
            Middleware(InstanceHeader, instance=lambda: worker.supervisor.instance),
            Middleware(ClusterTokenCheck, token=worker.settings.cluster_token),
            Middleware(UnforeseenErrors),
        ],
        exception_handlers={
            EngineError: on_engine_error,
            ClientGone: on_client_gone,
            HTTPException: on_http_exception,
        },
    )
    app.state.worker = worker
    return app
