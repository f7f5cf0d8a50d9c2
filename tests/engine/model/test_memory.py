"""The budget becomes KV blocks and rank rows; what lies outside the layers gets a small share."""

from engine.model.memory import MemorySplit, split_memory

ROW_BYTES = {"attention": 300, "mlp": 700, "embedding": 50, "head": 50}


def split(row_bytes: dict[str, int]) -> MemorySplit:
    return split_memory(
        budget_bytes=1_000_000,
        weight_bytes=0,
        activation_bytes=200_000,
        block_bytes=1_000,
        row_bytes=row_bytes,
        max_blocks=10_000,
        min_blocks=10,
    )


def test_groups_outside_the_layers_get_a_sixteenth_each() -> None:
    rows = split(ROW_BYTES).lora_rows

    assert rows["embedding"] == rows["head"] == 200_000 // 16 // 50
    assert rows["attention"] == rows["mlp"] == 200_000 * 14 // 16 // 1000


def test_the_shares_stay_inside_the_budget() -> None:
    whole = split(ROW_BYTES)

    assert whole.kv_bytes + whole.lora_bytes + whole.activation_bytes <= whole.budget_bytes
    assert whole.lora_bytes >= 195_000


def test_without_adapters_all_goes_to_blocks() -> None:
    assert split({}).lora_rows == {}
    assert split({}).num_blocks == 800
