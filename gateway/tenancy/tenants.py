"""Who a request belongs to: whose share of the workers it takes, whose cache it may read."""

from dataclasses import dataclass

from starlette.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One party whose requests share cached tokens with each other and with nobody else's."""

    tenant_id: str

    @property
    def cache_salt(self) -> str:
        """Return what keeps this tenant's cached tokens apart; equal at every gateway."""
        return f"tenant:{self.tenant_id}"


def tenant_of(_request: Request) -> Tenant:
    """Return whose request this is. One key, or none, is one tenant.

    Nothing that a client sends beside its key has a say in this.
    """
    return Tenant(tenant_id="default")
