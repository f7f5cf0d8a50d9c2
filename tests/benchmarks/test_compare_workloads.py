"""Prompts are new in every level, and each workload asks for the adapters that its name says."""

from collections import Counter
from pathlib import Path

from compare_workloads import Scale, choose_adapters, groups
from peers.peer import Adapter
from peers.server import shortened

ADAPTERS = tuple(
    Adapter(name=f"adapter-r16-{number}", folder=Path("there"), lora_rank=16)
    for number in range(64)
)


def test_all_distinct_asks_for_no_adapter_twice_in_flight() -> None:
    chosen = choose_adapters("all distinct", 128, adapters=ADAPTERS, seed="1")

    assert all(len({*chosen[start : start + 64]}) == 64 for start in range(64))


def test_base_asks_for_none_and_one_adapter_always_for_the_same() -> None:
    assert {*choose_adapters("base", 8, adapters=ADAPTERS, seed="1")} == {None}
    assert {*choose_adapters("one adapter", 8, adapters=ADAPTERS, seed="1")} == {ADAPTERS[0]}


def test_zipf_asks_for_the_first_most_and_repeats_for_the_same_seed() -> None:
    chosen = choose_adapters("zipf", 4000, adapters=ADAPTERS, seed="1")

    assert Counter(chosen).most_common(1)[0][0] == ADAPTERS[0]
    assert chosen == choose_adapters("zipf", 4000, adapters=ADAPTERS, seed="1")


def test_every_group_has_room_for_all_that_is_in_flight() -> None:
    scale = Scale(concurrencies=(1, 8, 32))

    for group in groups(scale):
        assert group.num_kv_tokens >= scale.max_concurrency * group.max_model_len
        assert group.max_model_len > scale.prompt_tokens + scale.output_tokens


def test_flags_show_no_folders_and_count_adapters() -> None:
    line = "LD_PRELOAD=/usr/lib/a.so:/x/b.so /venv/bin/server --lora /x/1.gguf,/x/2.gguf --port 0"

    assert shortened(line) == "LD_PRELOAD=a.so:b.so server --lora <2 adapters> --port 0"
    assert shortened("--modules adapter-1=/x/1 adapter-2=/x/2") == "--modules <2 adapters>"
