"""What a worker says about itself every second, and the proof that it may say so."""

import hashlib
import hmac

import msgspec


class WorkerHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's address, load and residency; written by the worker, read by gateways.

    instance   a new id with every start of the engine core, which then knows no adapter
    resident   lora_ids whose rows are in the arena now; never those in flight
    disk       lora_ids whose arena image is on this worker's disk
    signature  hex HMAC-SHA256 over the other fields with the cluster token; "" without one
    """

    worker_id: str
    address: str
    base_id: str
    base_identity: str
    instance: str
    kind: str = "loraplex"
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    resident: list[str] = []
    disk: list[str] = []
    signature: str = ""


def _digest(heartbeat: WorkerHeartbeat, token: str) -> str:
    unsigned = msgspec.structs.replace(heartbeat, signature="")
    message = msgspec.json.encode(unsigned, order="deterministic")
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def sign(heartbeat: WorkerHeartbeat, token: str | None) -> WorkerHeartbeat:
    """Return the heartbeat with its signature; without a token the signature is empty."""
    signature = _digest(heartbeat, token) if token else ""
    return msgspec.structs.replace(heartbeat, signature=signature)


def verify(heartbeat: WorkerHeartbeat, token: str | None) -> bool:
    """Tell whether the sender knew the cluster token; without a token everyone is believed."""
    if not token:
        return True
    return hmac.compare_digest(heartbeat.signature, _digest(heartbeat, token))
