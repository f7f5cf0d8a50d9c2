"""All routes. What isn't here doesn't exist, and what is here says who may call it."""

from gateway.route_spec import RouteSpec
from gateway.routes import adapters, docs, health, inference, models, tokens, vllm_lora, workers

TABLE: tuple[RouteSpec, ...] = (
    *inference.ROUTES,
    *tokens.ROUTES,
    *models.ROUTES,
    *adapters.ROUTES,
    *vllm_lora.ROUTES,
    *workers.ROUTES,
    *health.ROUTES,
    *docs.ROUTES,
)
