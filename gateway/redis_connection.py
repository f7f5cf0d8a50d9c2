"""The one connection pool to Redis, set so that its absence is noticed soon."""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 2.0


def connect(url: str) -> Redis:
    """Return a client for `url`; nothing is sent before its first command.

    One repeat at once, since a pooled connection may have died with the last server.
    """
    return Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),
    )
