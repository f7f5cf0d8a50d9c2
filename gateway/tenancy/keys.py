"""Which key opens which routes."""

import hashlib
import hmac
import secrets
from enum import Enum

from gateway.errors import Forbidden, Unauthorized


class Access(Enum):
    """Who may call a route."""

    PUBLIC = "public"
    DATA = "data"
    ADMIN = "admin"


class KeyRing:
    """One optional data key and one optional admin key; the admin key opens data routes too.

    With no key at all everything is open, which is why only loopback may be bound then. With one
    key, what the missing one would open is shut, but never less than the admin key opens.
    Only digests under a key of this process are kept and compared, in constant time.
    """

    def __init__(self, *, api_key: str | None, admin_key: str | None) -> None:
        self._secret = secrets.token_bytes(32)
        self._data = self._digest(api_key) if api_key else None
        self._admin = self._digest(admin_key) if admin_key else None

    @property
    def is_open(self) -> bool:
        """True when nobody needs a key."""
        return self._data is None and self._admin is None

    def check(self, authorization: str | None, access: Access) -> None:
        """Return if the header opens `access`; raise Unauthorized or Forbidden if not."""
        if access is Access.PUBLIC or self.is_open:
            return
        key = _bearer(authorization)
        if key is None:
            raise Unauthorized("send your key in the header `Authorization: Bearer <key>`")
        digest = self._digest(key)
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        is_data = self._data is not None and hmac.compare_digest(digest, self._data)
        if not (is_admin or is_data):
            raise Unauthorized("this key isn't known here")
        if access is Access.ADMIN and not is_admin:
            raise Forbidden("this route wants the admin key")

    def _digest(self, key: str) -> bytes:
        return hmac.new(self._secret, key.encode(), hashlib.sha256).digest()


def _bearer(authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None
