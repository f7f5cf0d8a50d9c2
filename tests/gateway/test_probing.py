"""An upload is routable only when a worker has seen it do something; old versions make room."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters.record import VersionState
from gateway.probing import NUM_KEPT
from tests.gateway.scripted_worker import EFFECT, NO_EFFECT, Refusal, ScriptedWorker
from tests.gateway.serving import closed_port, served
from tests.gateway.world import WEIGHTS, World, gateway_world

pytestmark = pytest.mark.anyio


def scaled(source: Path, folder: Path, factor: float) -> Path:
    """Write a copy of an adapter with its B multiplied."""
    folder.mkdir(parents=True)
    (folder / WEIGHTS[0]).write_bytes((source / WEIGHTS[0]).read_bytes())
    tensors = load_file(source / WEIGHTS[1])
    save_file(
        {n: t * np.float32(factor) if "lora_B" in n else t for n, t in tensors.items()},
        folder / WEIGHTS[1],
    )
    return folder


async def version_of(world: World, label: str = "v1") -> dict[str, Any]:
    shown = (await world.http.get("/v1/adapters/pirate")).json()
    return next(each for each in shown["versions"] if each["version"] == label)


async def until_state(world: World, state: VersionState) -> None:
    """Ask until the one version is in `state`; the test's timeout ends it otherwise."""
    while (await version_of(world))["state"] != state:
        pass


async def test_an_upload_is_probed_once_before_it_is_answered(world, peft_adapters):
    answer = await world.push("pirate", peft_adapters["pirate"])

    assert (answer.status_code, answer.json()["state"]) == (201, "active")
    again = await world.push("pirate", peft_adapters["pirate"])
    assert (again.status_code, again.json()["state"]) == (200, "active")
    assert world.worker.num_probes == 1


async def test_what_has_no_effect_fails_with_the_numbers(world, peft_adapters):
    world.worker.probe = NO_EFFECT

    answer = await world.push("pirate", peft_adapters["pirate"])

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "adapter_has_no_effect")
    assert "logits differ by 0" in error["problems"][0]
    version = await version_of(world)
    assert (version["state"], version["reason"]) == ("failed", error["problems"][0])
    assert (await world.complete("pirate")).status_code == 404
    await world.worker.unloaded.wait()


async def test_a_failed_version_may_be_uploaded_again(world, peft_adapters):
    world.worker.probe = NO_EFFECT
    await world.push("pirate", peft_adapters["pirate"])
    world.worker.probe = EFFECT

    answer = await world.push("pirate", peft_adapters["pirate"])

    assert (answer.json()["state"], answer.json()["version"]) == ("active", "v1")
    assert (await world.complete("pirate")).status_code == 200


async def test_a_deliberate_no_op_is_served_when_asked_for(world, peft_adapters, tmp_path):
    world.worker.probe = NO_EFFECT
    zeros = scaled(peft_adapters["pirate"], tmp_path / "zeros", 0.0)

    for folder in (zeros, peft_adapters["pirate"]):
        refused = await world.push("noop", folder)
        assert refused.json()["error"]["code"] == "adapter_has_no_effect"
        answer = await world.push("noop", folder, allow_no_effect="true", promote="true")
        assert (answer.status_code, answer.json()["state"]) in [(201, "active"), (200, "active")]
        assert answer.json()["aliases"]["default"] == answer.json()["digest"]

    assert (await world.complete("noop")).status_code == 200
    store = json.loads(
        (world.store_dir / "versions").glob("*/manifest.json").__next__().read_text()
    )
    assert store["allows_no_effect"] is True


async def test_logits_that_are_not_finite_are_refused(world, peft_adapters):
    world.worker.probe = NO_EFFECT | {"is_finite": False}

    answer = await world.push("pirate", peft_adapters["pirate"], allow_no_effect="true")

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_adapter")
    assert "finite" in answer.json()["error"]["message"]


async def test_what_a_worker_refuses_to_load_fails_in_its_words(world, peft_adapters):
    world.worker.load_refusal = Refusal(422, "invalid_adapter")

    answer = await world.push("pirate", peft_adapters["pirate"])

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_adapter")
    assert (await version_of(world))["state"] == "failed"
    assert str(world.store_dir) not in answer.text


async def test_a_worker_that_has_forgotten_is_given_the_version_again(world, peft_adapters):
    digest = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]
    world.worker.forget_everything()

    answer = await world.push("copy", peft_adapters["pirate"])

    assert answer.json()["state"] == "active"
    assert answer.json()["digest"] == digest


async def test_without_a_worker_it_waits_and_is_not_routable(
    valkey_url, redis_client, tmp_path, peft_adapters
):
    """Stored and named, but nobody could say yet what it does; then a worker comes."""
    async with gateway_world(
        valkey_url, tmp_path, num_workers=0, snapshot_interval_s=0.05
    ) as world:
        first = await world.push("pirate", peft_adapters["pirate"])
        second = await world.push("pirate", peft_adapters["json"], promote="true")

        assert (first.status_code, second.status_code) == (202, 202)
        assert (first.json()["state"], first.json()["aliases"]) == ("probing", {})
        refused = await world.complete("pirate")
        assert refused.status_code == 404
        by_number = await world.complete("pirate@v1")
        assert "probing" in by_number.json()["error"]["message"]

        worker = ScriptedWorker()
        async with served(worker.app) as address:
            worker.address = address
            await world.beat(worker)
            await until_state(world, VersionState.ACTIVE)
            while (await version_of(world, "v2"))["state"] != "active":
                pass
            shown = (await world.http.get("/v1/adapters/pirate")).json()
            assert shown["aliases"]["default"]["version"] == "v2"
            assert (await world.complete("pirate")).status_code == 200


async def test_a_worker_that_cannot_be_reached_leaves_it_waiting(world, peft_adapters):
    await world.beat(world.worker, address=closed_port())

    answer = await world.push("pirate", peft_adapters["pirate"])

    assert (answer.status_code, answer.json()["state"]) == (202, "probing")


async def test_vllm_s_load_says_when_it_has_to_wait(world, peft_adapters):
    await world.beat(world.worker, address=closed_port())
    load = {"lora_name": "pirate", "lora_path": str(peft_adapters["pirate"])}

    answer = await world.http.post("/v1/load_lora_adapter", json=load)

    assert answer.status_code == 202
    assert "as soon as a worker has probed it" in answer.text


async def test_only_the_newest_versions_and_those_with_an_alias_are_kept(
    world, peft_adapters, tmp_path
):
    digests = []
    for number in range(NUM_KEPT + 3):
        folder = scaled(peft_adapters["pirate"], tmp_path / str(number), 1.0 + number)
        digests.append((await world.push("pirate", folder)).json()["digest"])

    shown = (await world.http.get("/v1/adapters/pirate")).json()
    kept = [version["digest"] for version in shown["versions"]]
    assert kept == [digests[0], *digests[-NUM_KEPT:]]
    versions = world.store_dir / "versions"
    gone = [versions / digest[7:] for digest in digests if digest not in kept]
    assert len(gone) == 2
    while any(path.exists() for path in gone) or len(world.worker.loaded) > len(kept):
        await world.http.get("/v1/adapters")
    assert {path.name for path in versions.iterdir()} == {digest[7:] for digest in kept}


async def test_bytes_that_another_adapter_names_stay(world, peft_adapters):
    digest = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]
    await world.push("copy", peft_adapters["pirate"])
    folder = world.store_dir / "versions" / digest[7:]

    await world.http.delete("/v1/adapters/pirate")
    await world.worker.unloaded.wait()
    assert (await world.complete("copy")).status_code == 200
    await world.http.delete("/v1/adapters/copy")
    while folder.exists():
        await world.http.get("/v1/adapters")

    back = await world.push("pirate", peft_adapters["pirate"])
    assert (back.status_code, back.json()["version"]) == (201, "v1")
    assert (await world.complete("pirate")).status_code == 200
