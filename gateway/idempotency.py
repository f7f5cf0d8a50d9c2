"""What `Idempotency-Key` remembers: an answer by key, for a day, in Redis.

A key is claimed before the request is worked on, and the claim becomes the answer. A gateway that
dies leaves a claim behind that ends by itself.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.errors import RegistryUnavailable

KEPT_MS = 24 * 3600 * 1000
CLAIM_MS = 30_000
_PREFIX = "{lp}:idempotency:"
_MAX_ATTEMPTS = 3

# KEYS entry    ARGV the claim, what follows it or "", milliseconds
_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('DEL', KEYS[1])
else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return 1
"""


class RememberedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as it was given, and the digest of what was asked."""

    fingerprint: str
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The right to answer for a key; `holder` is a secret of the request that has it."""

    holder: str


class _Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    holder: str
    answer: RememberedAnswer | None = None


class IdempotencyKeys:
    """Reads and writes what is remembered; holds no state but its connection."""

    def __init__(self, redis: Redis, *, claim_ms: int = CLAIM_MS, kept_ms: int = KEPT_MS) -> None:
        self._redis = redis
        self._claim_ms = claim_ms
        self._kept_ms = kept_ms

    async def claim(self, name: str) -> Claim | RememberedAnswer | None:
        """Return the right to answer, or the answer that was given; None: another is at it."""
        claim = Claim(holder=secrets.token_hex(16))
        for _ in range(_MAX_ATTEMPTS):
            if await self._do(
                self._redis.set(_key(name), _encoded(claim), nx=True, px=self._claim_ms)
            ):
                return claim
            found = await self._do(self._redis.get(_key(name)))
            if found is not None:
                return msgspec.json.decode(found, type=_Entry).answer
        return None

    async def hold(self, name: str, claim: Claim) -> None:
        """Renew the claim until cancelled, however long the request takes."""
        while True:
            await asyncio.sleep(self._claim_ms / 3000)
            await self._replace(name, claim, _encoded(claim), self._claim_ms)

    async def remember(self, name: str, claim: Claim, answer: RememberedAnswer) -> None:
        """Put the answer in the place of the claim."""
        entry = _Entry(holder=claim.holder, answer=answer)
        await self._replace(name, claim, msgspec.json.encode(entry), self._kept_ms)

    async def forget(self, name: str, claim: Claim) -> None:
        """Give the claim up, so that the same key may be tried again."""
        await self._replace(name, claim, b"", 1)

    async def _replace(self, name: str, claim: Claim, value: bytes, kept_ms: int) -> None:
        await self._do(
            self._redis.eval(_REPLACE, 1, _key(name), _encoded(claim), value, str(kept_ms))
        )

    async def _do(self, answer: Awaitable[Any] | Any) -> Any:
        try:
            return await cast("Awaitable[Any]", answer)
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(
                "the registry, which remembers Idempotency-Keys, can't be reached"
            ) from error


def _key(name: str) -> str:
    return _PREFIX + hashlib.sha256(name.encode()).hexdigest()


def _encoded(claim: Claim) -> bytes:
    return msgspec.json.encode(_Entry(holder=claim.holder))
