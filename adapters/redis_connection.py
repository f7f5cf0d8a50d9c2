"""The one way to Redis: its absence is noticed soon, and a cancellation always takes effect."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 2.0

if TYPE_CHECKING:
    _Base = AbstractConnection
else:
    _Base = object


def connect(url: str) -> Redis:
    """Return a client for `url`; nothing is sent before its first command.

    One repeat at once, since a pooled connection may have died with the last server.
    """
    client: Redis = Redis.from_url(
        url,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1),
    )
    pool = client.connection_pool
    kind = pool.connection_class
    pool.connection_class = type(f"Cancellable{kind.__name__}", (_Cancellable, kind), {})
    return client


class _Cancellable(_Base):
    """Goes before a connection class of the library's, whatever the URL has chosen.

    The library sends through asyncio.wait_for, which before Python 3.12 returns as if nothing had
    been when a cancellation comes just as its work is done: a loop that talks to Redis then goes on
    for ever, and whoever waits for its end with it.
    """

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """Send, and then end the task if that was asked for meanwhile."""
        task = asyncio.current_task()
        num_before = 0 if task is None else task.cancelling()
        await super().send_packed_command(command, check_health)
        if task is not None and task.cancelling() > num_before:
            # What has been asked is answered to nobody else.
            await self.disconnect(nowait=True)
            raise asyncio.CancelledError
