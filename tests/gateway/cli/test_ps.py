"""What `ps` shows of the workers."""

import json

WORKER = {
    "worker_id": "w-1",
    "kind": "loraplex",
    "address": "http://127.0.0.1:9",
    "base_id": "SmolLM2",
    "state": "ready",
    "num_running": 3,
    "num_waiting": 1,
    "num_free_blocks": 90,
    "num_blocks": 100,
    "resident": ["json@0123456789ab"],
    "disk": ["json@0123456789ab", "pirate@abcdefabcdef"],
    "status": None,
}
RESIDENT = {
    "lora_id": "json@0123456789ab",
    "tier": "disk",
    "state": "resident",
    "max_rank": 16,
    "num_rows": {"attention": 16},
    "num_leases": 2,
    "num_claims": 5,
    "pinned": False,
}


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_ps_shows_leases_claims_and_kv_blocks(cli, server):
    worker = {**WORKER, "status": {"adapters": [RESIDENT]}}
    server.answer("GET /v1/workers", {"object": "list", "data": [worker]})

    _, workers, _, adapters = rows_of(cli("ps").stdout)

    assert workers == ["w-1", "SmolLM2", "http://127.0.0.1:9", "ready", "3", "1", "10/100"]
    assert adapters == ["w-1", "json@0123456789ab", "disk", "resident", "16", "2", "5"]


def test_ps_falls_back_to_the_heartbeat(cli, server):
    server.answer("GET /v1/workers", {"object": "list", "data": [WORKER]})

    *_, first, second = rows_of(cli("ps").stdout)

    assert first == ["w-1", "json@0123456789ab", "disk", "resident", "-", "-", "-"]
    assert second == ["w-1", "pirate@abcdefabcdef", "disk", "absent", "-", "-", "-"]


def test_ps_without_workers_says_what_that_means(cli, server):
    server.answer("GET /v1/workers", {"object": "list", "data": []})

    assert "no worker is up" in cli("ps").stdout


def test_ps_as_json_is_the_servers_answer(cli, server):
    server.answer("GET /v1/workers", {"object": "list", "data": [WORKER]})

    assert json.loads(cli("ps", "--json").stdout)["data"] == [WORKER]
