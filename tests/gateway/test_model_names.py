"""What a `model` field means."""

import pytest

from adapters.names import split_model_name
from adapters.record import AdapterRecord, VersionEntry, VersionState, publish
from gateway.errors import ModelNotFound
from gateway.model_names import Target, near_names, resolve_model

D1, D2 = "sha256:" + "1" * 64, "sha256:" + "2" * 64
BASES = ["tiny", "tiny:chat"]


def pirate(base_id: str = "tiny") -> AdapterRecord:
    record = publish(None, name="pirate", base_id=base_id, digest=D1, created="")
    return publish(record, name="pirate", base_id=base_id, digest=D2, created="")


def resolved(model: str, record: AdapterRecord | None = None) -> Target:
    name = split_model_name(model, BASES)
    return resolve_model(model, model_name=name, record=record, known_names=lambda: ["tiny:pirate"])


def test_base_is_itself():
    target = resolved("tiny")

    assert (target.worker_model, target.version, target.lora_id) == ("tiny", "base", None)


def test_longest_base_wins():
    assert resolved("tiny:chat").base_id == "tiny:chat"
    assert resolved("tiny:chat:pirate", pirate("tiny:chat")).base_id == "tiny:chat"


@pytest.mark.parametrize(
    ("model", "digest"),
    [
        ("tiny:pirate", D1),
        ("pirate", D1),
        ("pirate@default", D1),
        ("tiny:pirate@v2", D2),
        (f"pirate@{D2}", D2),
        (f"pirate@{D2[:19]}", D2),
    ],
)
def test_reference_names_one_version(model, digest):
    target = resolved(model, pirate())

    assert target.digest == target.version == digest
    assert target.worker_model == f"pirate@{digest[7:19]}"
    assert target.public_name == model


@pytest.mark.parametrize("model", ["pirate@v3", "tiny:pirate@prod", "tiny:chat:pirate", "x:pirate"])
def test_what_does_not_exist_is_not_found(model):
    with pytest.raises(ModelNotFound):
        resolved(model, pirate())


def test_version_that_is_not_active_says_what_it_is():
    entry = VersionEntry(number=1, digest=D1, state=VersionState.PROBING, created="")
    record = AdapterRecord(name="pirate", base_id="tiny", generation=1, versions=(entry,))

    with pytest.raises(ModelNotFound, match="pirate@v1 is probing"):
        resolved("pirate@v1", record)


def test_near_names_are_found_among_thousands_with_or_without_the_base():
    known = [f"tiny:adapter-{number}" for number in range(5000)] + ["tiny:pirate"]

    assert near_names("tiny:pirat", known) == ["tiny:pirate"]
    assert near_names("Pirate", known) == ["tiny:pirate"]
    assert near_names("zzz", known) == []
