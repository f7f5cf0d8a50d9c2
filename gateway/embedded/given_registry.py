"""A Redis or Valkey that the operator runs: is it there?"""

import asyncio
from urllib.parse import urlsplit

import redis.exceptions

from adapters.redis_connection import connect
from gateway.embedded.errors import ServeRefused

ANSWER_TIMEOUT_S = 5.0


async def require_answer(url: str) -> None:
    """Return if a server answers at `url`; raise ServeRefused in words without its password."""
    try:
        client = connect(url)
    except ValueError as error:
        raise ServeRefused(
            "--redis-url must begin with redis://, rediss:// or unix://, and have a number as port"
        ) from error
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S), client:
            await client.ping()
    except redis.exceptions.AuthenticationError as error:
        raise ServeRefused(f"the registry at {_place(url)} wants another password") from error
    except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
        raise ServeRefused(
            f"no Redis or Valkey answers at {_place(url)}; start it, or leave --redis-url out for "
            "a private one"
        ) from error


def _place(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
