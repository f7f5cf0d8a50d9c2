"""`Idempotency-Key`: a request of the admin side that is sent again is done only once."""

import asyncio
import logging
import re
from contextlib import suppress
from typing import cast

from anyio import CancelScope
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.http_protocol import SERVER_SEND
from gateway.errors import GatewayError, InvalidRequest
from gateway.fingerprint import Fingerprint
from gateway.idempotency import Claim, RememberedAnswer
from gateway.middleware import SPEC_KEY
from gateway.parsing import with_bounded_body
from gateway.publishing import ACTOR
from gateway.route_spec import RouteSpec
from gateway.services import Gateway
from gateway.tenancy.keys import Access
from gateway.uploads import timely

logger = logging.getLogger(__name__)

HEADER = "idempotency-key"
REPLAYED_HEADER = "idempotent-replayed"
MAX_REMEMBERED_BYTES = 1 << 20
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
# What another try may change: the clock and the load.
_PASSING = frozenset({408, 429})
# Written anew for each answer.
_OWN_HEADERS = frozenset({"content-length", "connection", "x-request-id"})


class KeyInUse(GatewayError):
    """The first request with this key isn't answered yet."""

    code = "idempotency_key_in_use"
    status = 409
    retry_after_s = 1.0


class KeyReused(InvalidRequest):
    """The key came with another request before."""

    code = "idempotency_key_reused"
    status = 422


class RepeatAnswers:
    """Answers a POST of the admin side that carries a known key as it was answered before.

    Only what was read to its end and answered below 500 is remembered; after anything else, the
    same key may be tried again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key_of(scope)
        if key is None:
            await self._app(scope, receive, send)
            return
        gateway = cast("Gateway", scope["state"]["gateway"])
        claimed = await gateway.idempotency.claim(key)
        if claimed is None:
            raise KeyInUse("a request with this Idempotency-Key is being worked on; ask again")
        if isinstance(claimed, RememberedAnswer):
            await _repeat(claimed, gateway, scope, receive, send)
        else:
            await self._do(key, claimed, gateway, scope, receive, send)

    async def _do(
        self, key: str, claim: Claim, gateway: Gateway, scope: Scope, receive: Receive, send: Send
    ) -> None:
        recorder = _Recorder(scope, receive)
        holding = asyncio.create_task(gateway.idempotency.hold(key, claim))
        scope.pop(SERVER_SEND, None)
        try:
            await self._app(scope, recorder.receive, recorder.send)
        finally:
            holding.cancel()
            with CancelScope(shield=True), suppress(asyncio.CancelledError, GatewayError):
                await holding
            with CancelScope(shield=True):
                await _settle(key, claim, gateway, recorder.answer())
        for message in recorder.messages:
            await send(message)


async def _settle(
    key: str, claim: Claim, gateway: Gateway, answer: RememberedAnswer | None
) -> None:
    try:
        if answer is None:
            await gateway.idempotency.forget(key, claim)
        else:
            await gateway.idempotency.remember(key, claim, answer)
    except GatewayError:
        logger.warning("an answer couldn't be remembered by its Idempotency-Key")


async def _repeat(
    answer: RememberedAnswer, gateway: Gateway, scope: Scope, receive: Receive, send: Send
) -> None:
    fingerprint = Fingerprint(scope)
    request = Request(scope, timely(receive, gateway.settings))
    bounded = with_bounded_body(request, max_bytes=gateway.settings.max_upload_bytes)
    async for piece in bounded.stream():
        fingerprint.update(piece)
    if fingerprint.hexdigest() != answer.fingerprint:
        raise KeyReused(
            "this Idempotency-Key came with another request before: use a new key for each "
            "request, and the same one only to repeat it",
            param=HEADER,
        )
    headers = {**dict(answer.headers), REPLAYED_HEADER: "true"}
    await Response(answer.body, status_code=answer.status, headers=headers)(scope, receive, send)


class _Recorder:
    """Stands between a route and the wire: digests what comes in, keeps what goes out."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.messages: list[Message] = []
        self._receive = receive
        self._fingerprint = Fingerprint(scope)
        self._is_read = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._fingerprint.update(message.get("body", b""))
            self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    def answer(self) -> RememberedAnswer | None:
        """Return what is worth remembering, or None."""
        if not self.messages or not self._is_read:
            return None
        start, *bodies = self.messages
        body = b"".join(message.get("body", b"") for message in bodies)
        is_whole = bool(bodies) and not bodies[-1].get("more_body", False)
        status = start["status"]
        if not is_whole or status >= 500 or status in _PASSING or len(body) > MAX_REMEMBERED_BYTES:
            return None
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]
        ]
        return RememberedAnswer(
            fingerprint=self._fingerprint.hexdigest(),
            status=status,
            headers=[(name, value) for name, value in headers if name not in _OWN_HEADERS],
            body=body,
        )


def _key_of(scope: Scope) -> str | None:
    """Return the key by which the request is remembered, if it is one that can be."""
    spec = scope.get(SPEC_KEY)
    if scope["type"] != "http" or not isinstance(spec, RouteSpec):
        return None
    keys = Headers(scope=scope).getlist(HEADER)
    if not keys or spec.method != "POST" or spec.access is not Access.ADMIN:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise InvalidRequest(
            "Idempotency-Key is one text of 1 to 255 visible ASCII characters, without spaces",
            param=HEADER,
        )
    return f"{ACTOR} {keys[0]}"
