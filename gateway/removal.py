"""Giving an adapter up: the name at once, its traces in the background."""

from gateway.services import Gateway


async def remove_adapter(gateway: Gateway, name: str) -> None:
    """Retire the name. Requests in flight finish; workers are asked to unload afterwards."""
    digests = await gateway.publisher.retire(name)
    gateway.pruner.remove(name, digests)
