import msgspec
import pytest

from adapters.heartbeat import WorkerHeartbeat, sign, verify


def heartbeat(**changes) -> WorkerHeartbeat:
    fields = {
        "worker_id": "w-1",
        "address": "http://127.0.0.1:1",
        "base_id": "tiny",
        "base_identity": "sha256:00",
        "instance": "i",
        "resident": ["a@0"],
    }
    return WorkerHeartbeat(**(fields | changes))


def test_a_signed_heartbeat_survives_the_wire() -> None:
    sent = msgspec.json.encode(sign(heartbeat(), "secret"))
    assert verify(msgspec.json.decode(sent, type=WorkerHeartbeat), "secret")


@pytest.mark.parametrize(
    "change", [{"address": "http://evil"}, {"resident": []}, {"num_running": 1}, {"signature": ""}]
)
def test_a_changed_field_breaks_the_signature(change: dict) -> None:
    assert not verify(msgspec.structs.replace(sign(heartbeat(), "secret"), **change), "secret")


def test_another_token_is_not_believed() -> None:
    assert not verify(sign(heartbeat(), "secret"), "other")
    assert not verify(sign(heartbeat(), None), "secret")


def test_without_a_token_everyone_is_believed() -> None:
    assert sign(heartbeat(), None).signature == ""
    assert verify(heartbeat(), None)
