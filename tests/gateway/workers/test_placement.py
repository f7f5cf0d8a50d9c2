"""Which worker gets a request."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.placement import WorkerView, choose_worker, home_worker

LORA_ID = "pirate@0123456789ab"


def worker(worker_id: str, **changes) -> WorkerView:
    fields = {
        "worker_id": worker_id,
        "address": f"http://{worker_id}",
        "base_id": "tiny",
        "base_identity": "sha256:00",
        "instance": "i-1",
        "num_free_blocks": 100,
        "num_blocks": 100,
    }
    return WorkerView(**(fields | changes))


def chosen(*workers: WorkerView, lora_id: str | None = LORA_ID, excluded=()) -> str | None:
    found = choose_worker(workers, base_id="tiny", lora_id=lora_id, excluded=excluded)
    return found.worker_id if found else None


def test_nobody_serves_an_unknown_base():
    assert chosen(worker("a", base_id="other")) is None
    assert chosen() is None


def test_resident_comes_first_though_it_has_more_to_do():
    resident = worker("a", resident=frozenset({LORA_ID}), num_running=5)

    assert chosen(worker("b"), resident, worker("c", disk=frozenset({LORA_ID}))) == "a"


def test_busy_resident_is_passed_over_for_one_that_has_it_on_disk():
    resident = worker("a", resident=frozenset({LORA_ID}), num_waiting=1)

    assert chosen(resident, worker("b"), worker("c", disk=frozenset({LORA_ID}))) == "c"


def test_worker_short_of_blocks_is_busy():
    resident = worker("a", resident=frozenset({LORA_ID}), num_free_blocks=4)

    assert chosen(resident, worker("b")) == "b"


def test_unknown_version_goes_to_its_home():
    workers = [worker(name) for name in "abcd"]
    home = home_worker(workers, LORA_ID)

    assert chosen(*workers) == home.worker_id
    assert chosen(*reversed(workers)) == home.worker_id


def test_versions_have_homes_everywhere():
    workers = [worker(name) for name in "abcd"]

    homes = [home_worker(workers, f"adapter-{n}@0").worker_id for n in range(400)]

    assert all(60 < homes.count(name) < 140 for name in "abcd")


def test_busy_home_leaves_it_to_the_least_loaded():
    names = "abcd"
    home = home_worker([worker(name) for name in names], LORA_ID).worker_id
    rest = [name for name in names if name != home]
    workers = [worker(name, num_running=3 + rest.index(name)) for name in rest]

    assert chosen(worker(home, num_waiting=2), *workers) == rest[0]


def test_base_goes_to_the_least_loaded_by_either_count():
    assert chosen(worker("a", num_running=2), worker("b", num_sent=1), lora_id=None) == "b"


def test_suspect_is_used_only_when_alone():
    suspect = worker("a", is_suspect=True, resident=frozenset({LORA_ID}))

    assert chosen(suspect, worker("b")) == "b"
    assert chosen(suspect) == "a"
    assert chosen(suspect, worker("b"), excluded={"b"}) == "a"


@given(
    st.lists(
        st.builds(
            worker,
            st.sampled_from("abcdef"),
            num_waiting=st.integers(0, 2),
            num_running=st.integers(0, 5),
            is_suspect=st.booleans(),
            resident=st.sampled_from([frozenset(), frozenset({LORA_ID})]),
        ),
        unique_by=lambda view: view.worker_id,
    ),
    st.sets(st.sampled_from("abcdef")),
)
def test_somebody_is_chosen_whenever_somebody_may_be(workers, excluded):
    name = chosen(*workers, excluded=excluded)

    able = {view.worker_id for view in workers} - excluded
    assert (name in able) if able else (name is None)
