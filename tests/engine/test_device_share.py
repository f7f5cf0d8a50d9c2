"""Workers of one machine: which device each takes, and how much of its memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.device_share import SHARE, DeviceShare

GIB = 1 << 30


def shares(num_workers, num_devices):
    return [
        DeviceShare.of(index, num_workers=num_workers, num_devices=num_devices)
        for index in range(num_workers)
    ]


def budgets(shares_of_a_machine, *, device_bytes, weight_bytes):
    """Start the workers in order: each loads its weights, measures and takes its budget."""
    free_bytes = dict.fromkeys((share.index for share in shares_of_a_machine), device_bytes)
    found = []
    for share in shares_of_a_machine:
        free_bytes[share.index] -= weight_bytes
        budget = share.budget_bytes(
            num_free_bytes=free_bytes[share.index], weight_bytes=weight_bytes
        )
        free_bytes[share.index] -= budget
        assert free_bytes[share.index] >= share.num_later * weight_bytes
        found.append(budget)
    return found


@given(num_workers=st.integers(1, 64), num_devices=st.integers(1, 16))
def test_workers_are_dealt_over_the_devices_and_know_who_comes_after_them(num_workers, num_devices):
    dealt = [share.index for share in shares(num_workers, num_devices)]
    counts = [dealt.count(device) for device in range(num_devices)]
    assert max(counts) - min(counts) <= 1
    for number, share in enumerate(shares(num_workers, num_devices)):
        assert share.num_later == dealt[number + 1 :].count(share.index)


def test_a_worker_alone_takes_nine_tenths_of_what_is_free():
    assert budgets(shares(1, 1), device_bytes=12 * GIB, weight_bytes=2 * GIB) == [9 * GIB]


def test_workers_on_devices_of_their_own_take_as_much_as_each_would_alone():
    assert budgets(shares(2, 2), device_bytes=12 * GIB, weight_bytes=2 * GIB) == [9 * GIB] * 2


@given(
    num_workers=st.integers(2, 8),
    weight_gib=st.floats(0.1, 4.0),
    spare_gib=st.floats(1.0, 200.0),
)
def test_workers_on_one_device_divide_what_all_their_weights_leave(
    num_workers, weight_gib, spare_gib
):
    weight_bytes, spare_bytes = int(weight_gib * GIB), int(spare_gib * GIB)
    device_bytes = num_workers * weight_bytes + spare_bytes
    found = budgets(shares(num_workers, 1), device_bytes=device_bytes, weight_bytes=weight_bytes)
    assert sum(found) <= spare_bytes
    assert min(found) >= SHARE * spare_bytes / num_workers - 1
    # Later ones find a little of what earlier ones left unused.
    assert max(found) < 1.3 * min(found)


def test_without_room_for_the_weights_of_the_others_nothing_is_left():
    share = DeviceShare.of(0, num_workers=3, num_devices=1)
    assert share.budget_bytes(num_free_bytes=3 * GIB, weight_bytes=2 * GIB) == 0


@pytest.mark.parametrize("worker_index", [-1, 2])
def test_a_place_outside_the_workers_is_refused(worker_index):
    with pytest.raises(ValueError, match="worker_index must be between 0 and 1"):
        EngineConfig(model="m", state_dir="s", worker_index=worker_index, num_workers=2)
