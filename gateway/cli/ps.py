"""`loraplex ps`: what the workers hold and do."""

from typing import Any

from gateway.cli.client import ApiClient
from gateway.cli.flags import DEFAULT_URL, AdminKeyFlag, JsonFlag, UrlFlag
from gateway.cli.output import Output, plain_table, reporting


def ps(url: UrlFlag = DEFAULT_URL, api_key: AdminKeyFlag = None, json: JsonFlag = False) -> None:
    """Show workers, their adapters, requests and KV blocks."""
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        answer = client.request("GET", "/v1/workers")
        if json:
            output.json(answer)
        elif answer["data"]:
            _print_workers(output, answer["data"])
        else:
            output.line("no worker is up; requests are answered 503 until one joins")


def _print_workers(output: Output, workers: list[dict[str, Any]]) -> None:
    table = plain_table(
        "WORKER", "BASE", "ADDRESS", "STATE", "RUNNING", "WAITING", "KV BLOCKS USED"
    )
    for worker in workers:
        num_used = worker["num_blocks"] - worker["num_free_blocks"]
        table.add_row(
            worker["worker_id"],
            worker["base_id"],
            worker["address"],
            worker.get("state", "-"),
            str(worker["num_running"]),
            str(worker["num_waiting"]),
            f"{num_used}/{worker['num_blocks']}",
        )
    output.table(table)
    rows = [row for worker in workers for row in _adapter_rows(worker)]
    if rows:
        adapters = plain_table(
            "WORKER", "ADAPTER VERSION", "TIER", "STATE", "RANK", "LEASES", "CLAIMS"
        )
        for row in rows:
            adapters.add_row(*row)
        output.line("")
        output.table(adapters)


def _adapter_rows(worker: dict[str, Any]) -> list[list[str]]:
    """One row a version: from the worker's own status when it is there, else its heartbeat."""
    worker_id: str = worker["worker_id"]
    status = worker.get("status")
    adapters = status.get("adapters") if isinstance(status, dict) else None
    if adapters is not None:
        return [
            [
                worker_id,
                adapter["lora_id"],
                adapter["tier"],
                adapter["state"],
                str(adapter["max_rank"]),
                str(adapter["num_leases"]),
                str(adapter["num_claims"]),
            ]
            for adapter in adapters
        ]
    resident = set(worker.get("resident", []))
    known = sorted(resident | set(worker.get("disk", [])))
    return [
        [worker_id, lora_id, "disk", "resident" if lora_id in resident else "absent", "-", "-", "-"]
        for lora_id in known
    ]
