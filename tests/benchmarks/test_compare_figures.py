"""Medians over rounds, ratios of medians, and what disturbed rounds do to them."""

from typing import Any

from compare_figures import THROUGH, Target, cells, prefix_table, ratio, ratio_table

BASE = Target(workload="base", peers=("slow", "fast"), at_least={8: 1.5})
TITLES = {"loraplex": "Loraplex", "slow": "Slow", "fast": "Fast"}


def record(
    peer: str, speed: float, *, workload: str = "base", others: float = 0.0
) -> dict[str, Any]:
    level = {
        "workload": workload,
        "concurrency": 8,
        "output_tokens_per_s": speed,
        "ttft_p50_s": 1.0,
        "inter_token_p50_ms": 10.0,
        "others_cores": others,
    }
    return {"peer": peer, "group": "short", "levels": [level]}


def test_a_cell_is_the_median_of_its_rounds() -> None:
    found = cells([record("slow", speed) for speed in (10, 90, 20)])

    assert found["slow", "base", 8].output_tokens_per_s == 20


def test_rounds_in_which_others_took_time_dont_count_beside_quiet_ones() -> None:
    found = cells([record("slow", 10, others=0.5), record("slow", 30), record("slow", 40)])

    assert found["slow", "base", 8].output_tokens_per_s == 35
    assert not found["slow", "base", 8].is_disturbed


def test_a_cell_without_a_quiet_round_is_marked() -> None:
    found = cells([record("slow", 10, others=0.5)])

    assert found["slow", "base", 8].is_disturbed


def test_a_ratio_is_against_the_fastest_of_the_peers() -> None:
    found = cells([record("loraplex", 100), record("slow", 10), record("fast", 50)])

    assert ratio(found, BASE, 8) == 2.0


def test_a_ratio_of_what_wasnt_measured_is_none() -> None:
    assert ratio(cells([record("loraplex", 100)]), BASE, 8) is None
    assert ratio(cells([record("slow", 100)]), BASE, 8) is None


def test_our_own_other_workload_can_be_the_measure() -> None:
    target = Target(
        workload="all distinct", peers=("loraplex",), at_least={8: 0.8}, of_workload="base"
    )
    found = cells([record("loraplex", 100), record("loraplex", 75, workload="all distinct")])

    assert ratio(found, target, 8) == 0.75


def test_a_start_that_failed_has_no_levels() -> None:
    assert cells([{"peer": "slow", "group": "short"}]) == {}


def test_the_table_shows_only_targets_of_which_something_was_measured() -> None:
    records = [record("loraplex", 100), record("vllm", 50), record("vllm-preload", 80)]
    titles = TITLES | {"vllm": "V", "vllm-preload": "W"}

    lines = ratio_table(cells(records), titles).splitlines()

    assert len(lines) == 3
    assert "base, against V or W, the better" in lines[2]
    assert "1.25 (≥ 1.15)" in lines[2]
    assert THROUGH not in "".join(lines)


def test_a_prefix_that_is_there_is_compared_with_one_of_each_requests_own() -> None:
    records = [
        record("loraplex", 1, workload=f"prefix: {kind}") for kind in ("own", "new", "again")
    ]
    records[0]["levels"][0]["ttft_p50_s"] = 9.0

    assert prefix_table(cells(records), TITLES).splitlines()[-1].endswith("| 9.0 |")


def test_a_table_of_what_wasnt_measured_is_empty() -> None:
    found = cells([record("slow", 1)])

    assert ratio_table(found, TITLES) == ""
    assert prefix_table(found, TITLES) == ""
