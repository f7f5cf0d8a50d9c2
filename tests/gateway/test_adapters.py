"""The life of an adapter over HTTP."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.gateway.peft_adapters import tiny_base
from tests.gateway.world import WEIGHTS, gateway_world

pytestmark = pytest.mark.anyio


def tar_of(folder: Path, *, mode: str = "w:gz", prefix: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name in (*WEIGHTS, "README.md"):
            archive.add(folder / name, prefix + name)
    return buffer.getvalue()


def zip_of(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in WEIGHTS:
            archive.write(folder / name, name)
    return buffer.getvalue()


async def upload(world, filename: str, content: bytes, **fields: str):
    files = [("file", (filename, content))]
    return await world.http.post("/v1/adapters", data={"name": "pirate", **fields}, files=files)


async def test_first_upload_becomes_default_and_says_what_it_is(world, peft_adapters):
    answer = await world.push("pirate", peft_adapters["pirate"])

    assert answer.status_code == 201
    document = answer.json()
    digest = document["digest"]
    assert digest.startswith("sha256:")
    assert document == {
        "name": "pirate",
        "base": "tiny",
        "version": "v1",
        "digest": digest,
        "lora_id": f"pirate@{digest[7:19]}",
        "state": "active",
        "generation": 2,
        "aliases": {"default": digest},
        "coverage": "4/14 modules",
        "max_rank": 4,
        "targets": ["q_proj", "v_proj"],
        "num_bytes": document["num_bytes"],
        "warnings": document["warnings"],
        "notes": document["notes"],
        "skipped": [],
    }
    shown = (await world.http.get("/v1/adapters/pirate")).json()
    assert shown["aliases"] == {"default": {"version": "v1", "digest": digest}}
    assert shown["versions"][0]["coverage"] == "4/14 modules"
    assert (await world.http.get("/v1/adapters")).json()["data"] == [shown]


async def test_same_content_again_is_the_same_version(world, peft_adapters):
    first = await world.push("pirate", peft_adapters["pirate"])
    again = await upload(world, "a.tar.gz", tar_of(peft_adapters["pirate"]))

    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["version"] == "v1"
    assert again.json()["generation"] == 2
    assert again.json()["skipped"] == ["README.md"]
    assert len(list((world.store_dir / "versions").iterdir())) == 1


@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.zip", "deep.tar"])
async def test_archives_are_unpacked(world, peft_adapters, name):
    folder = peft_adapters["pirate"]
    content = {
        "a.tar": lambda: tar_of(folder, mode="w"),
        "a.tgz": lambda: tar_of(folder),
        "a.zip": lambda: zip_of(folder),
        "deep.tar": lambda: tar_of(folder, prefix="out/checkpoint-3/"),
    }[name]()

    answer = await upload(world, name, content)

    assert answer.status_code == 201, answer.text


async def test_path_below_an_allowed_root_is_read(world, peft_adapters):
    body = {"name": "pirate", "path": str(peft_adapters["pirate"]), "base": "tiny"}

    answer = await world.http.post("/v1/adapters", json=body)

    assert answer.status_code == 201, answer.text
    assert answer.json()["skipped"] == ["README.md"]


@pytest.mark.parametrize("path", ["/etc", "/nowhere/at/all", "relative", "", "\0"])
async def test_path_elsewhere_is_refused_whether_or_not_it_exists(world, path):
    answer = await world.http.post("/v1/adapters", json={"name": "x", "path": path or " "})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "path"
    assert answer.json()["error"]["code"] == "path_not_allowed"


async def test_link_out_of_an_allowed_root_is_refused(valkey_url, redis_client, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to("/etc")
    async with gateway_world(valkey_url, tmp_path / "store", allowed_roots=(root,)) as world:
        answer = await world.http.post(
            "/v1/adapters", json={"name": "x", "path": str(root / "out")}
        )

    assert answer.json()["error"]["code"] == "path_not_allowed"


async def test_all_problems_are_told_and_nothing_stays(world, peft_adapters, tmp_path):
    config = json.loads((peft_adapters["pirate"] / WEIGHTS[0]).read_text())
    config |= {"use_dora": True, "r": 8}
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / WEIGHTS[0]).write_text(json.dumps(config))
    (tmp_path / "bad" / WEIGHTS[1]).write_bytes((peft_adapters["pirate"] / WEIGHTS[1]).read_bytes())

    answer = await world.push("pirate", tmp_path / "bad")

    error = answer.json()["error"]
    assert answer.status_code == 422
    assert error["code"] == "invalid_adapter"
    assert len(error["problems"]) >= 2
    assert "use_dora" in answer.text
    assert str(world.store_dir) not in answer.text
    assert list((world.store_dir / "versions").iterdir()) == []
    assert list((world.store_dir / "staging").iterdir()) == []
    assert (await world.http.get("/v1/adapters/pirate")).status_code == 404


async def test_archive_that_climbs_out_is_refused(world, peft_adapters):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(peft_adapters["pirate"] / WEIGHTS[0], "../" + WEIGHTS[0])

    answer = await upload(world, "a.tar", buffer.getvalue())

    assert answer.status_code == 422
    assert list((world.store_dir / "staging").iterdir()) == []


@pytest.mark.parametrize("filename", ["../adapter_config.json", "/adapter_config.json", ".."])
async def test_file_names_that_climb_are_refused(world, filename):
    answer = await upload(world, filename, b"{}")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "files"


async def test_too_large_an_upload_is_refused_with_both_numbers(
    valkey_url, redis_client, tmp_path, peft_adapters
):
    async with gateway_world(valkey_url, tmp_path, max_upload_bytes=2000) as world:
        announced = await world.push("pirate", peft_adapters["pirate"])

        async def chunks():
            yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
            for _ in range(40):
                yield b"y" * 100

        unannounced = await world.http.post(
            "/v1/adapters",
            content=chunks(),
            headers={"content-type": "multipart/form-data; boundary=x"},
        )

    for answer in (announced, unannounced):
        assert answer.status_code == 413, answer.text
        assert "at most 2000" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"name": "a/b"}, "name", 400),
        ({"name": ""}, "name", 400),
        ({"promote": "yes"}, "promote", 400),
        ({"colour": "red"}, "colour", 400),
        ({"base": "other"}, "base", 404),
    ],
)
async def test_bad_form_field_is_named(world, peft_adapters, fields, param, status):
    answer = await upload(world, "a.zip", zip_of(peft_adapters["pirate"]), **fields)

    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


async def test_form_without_files_or_name_is_refused(world):
    for data, param in (({"name": "x"}, "files"), ({"base": "tiny"}, "name")):
        answer = await world.http.post("/v1/adapters", data=data, files={"promote": (None, "true")})

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_base_is_needed_when_there_are_several(world, peft_adapters):
    await world.registry.put_base(tiny_base("small"))

    unclear = await world.push("pirate", peft_adapters["pirate"])
    clear = await world.push("pirate", peft_adapters["pirate"], base="small")
    other = await world.push("pirate", peft_adapters["json"], base="tiny")

    assert (unclear.status_code, unclear.json()["error"]["param"]) == (400, "base")
    assert clear.json()["base"] == "small"
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")


async def test_promote_and_rollback_move_default(world, peft_adapters):
    first = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]
    second = (await world.push("pirate", peft_adapters["json"])).json()

    assert second["version"] == "v2"
    assert second["aliases"] == {"default": first}
    url = "/v1/adapters/pirate/aliases/default"
    moved = await world.http.put(url, json={"version": "v2"})
    assert moved.json()["aliases"]["default"]["version"] == "v2"
    back = await world.http.post("/v1/adapters/pirate/rollback")
    assert back.json()["aliases"]["default"]["version"] == "v1"
    forth = await world.http.post("/v1/adapters/pirate/rollback", json={"alias": "default"})
    assert forth.json()["aliases"]["default"]["version"] == "v2"


async def test_alias_can_follow_an_alias_or_a_digest(world, peft_adapters):
    digest = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]

    for alias, version in (("prod", "default"), ("canary", digest)):
        url = f"/v1/adapters/pirate/aliases/{alias}"
        answer = await world.http.put(url, json={"version": version})
        assert answer.json()["aliases"][alias] == {"version": "v1", "digest": digest}

    assert (await world.complete("tiny:pirate@prod")).headers["x-loraplex-version"] == digest


async def test_generation_guards_a_move(world, peft_adapters):
    await world.push("pirate", peft_adapters["pirate"])
    await world.push("pirate", peft_adapters["json"])
    url = "/v1/adapters/pirate/aliases/default"

    stale = await world.http.put(url, json={"version": "v2"}, params={"if_generation": 3})
    fresh = await world.http.put(url, json={"version": "v2"}, params={"if_generation": 4})
    odd = await world.http.put(url, json={"version": "v2"}, params={"if_generation": "two"})

    assert (stale.status_code, stale.headers["x-should-retry"]) == (409, "false")
    assert fresh.status_code == 200
    assert odd.status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/adapters/nope", None, 404),
        ("DELETE", "/v1/adapters/nope", None, 404),
        ("PUT", "/v1/adapters/nope/aliases/prod", {"version": "v1"}, 404),
        ("PUT", "/v1/adapters/pirate/aliases/prod", {"version": "v7"}, 404),
        ("PUT", "/v1/adapters/pirate/aliases/prod", {"version": "nope"}, 404),
        ("PUT", "/v1/adapters/pirate/aliases/v1", {"version": "v1"}, 400),
        ("PUT", "/v1/adapters/pirate/aliases/prod", {"to": "v1"}, 400),
        ("POST", "/v1/adapters/nope/rollback", None, 404),
        ("POST", "/v1/adapters/pirate/rollback", None, 409),
        ("POST", "/v1/adapters/pirate/rollback", {"alias": "nope"}, 404),
    ],
)
async def test_impossible_change_says_why(world, peft_adapters, method, path, body, status):
    await world.push("pirate", peft_adapters["pirate"])

    answer = await world.http.request(method, path, json=body)

    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


async def test_removed_adapter_is_gone_at_once_and_unloaded_soon(world, peft_adapters):
    await world.push("pirate", peft_adapters["pirate"])
    await world.complete("pirate")

    answer = await world.http.delete("/v1/adapters/pirate")

    assert answer.json() == {"name": "pirate", "deleted": True}
    assert (await world.complete("pirate")).status_code == 404
    assert (await world.http.get("/v1/adapters/pirate")).status_code == 404
    await world.worker.unloaded.wait()
    assert world.worker.loaded == {}


async def test_name_that_was_removed_can_be_used_again(world, peft_adapters):
    await world.push("pirate", peft_adapters["pirate"])
    await world.http.delete("/v1/adapters/pirate")

    again = await world.push("pirate", peft_adapters["json"])

    assert again.status_code == 201
    assert again.json()["version"] == "v2"
    assert (await world.complete("pirate")).status_code == 200


async def test_vllm_s_calls_publish_move_and_remove(world, peft_adapters):
    load = {"lora_name": "org/pirate", "lora_path": str(peft_adapters["pirate"])}

    first = await world.http.post("/v1/load_lora_adapter", json=load)
    assert first.text == "Success: LoRA adapter 'org/pirate' added successfully."
    assert (await world.complete("org--pirate")).status_code == 200

    again = await world.http.post("/v1/load_lora_adapter", json=load)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")

    load |= {"lora_path": str(peft_adapters["json"]), "load_inplace": True}
    moved = await world.http.post("/v1/load_lora_adapter", json=load)
    assert moved.status_code == 200
    shown = (await world.http.get("/v1/adapters/org--pirate")).json()
    assert shown["aliases"]["default"]["version"] == "v2"

    gone = await world.http.post("/v1/unload_lora_adapter", json={"lora_name": "org/pirate"})
    assert gone.text == "Success: LoRA adapter 'org/pirate' removed successfully."
    unknown = await world.http.post("/v1/unload_lora_adapter", json={"lora_name": "org/pirate"})
    assert unknown.status_code == 404


async def test_vllm_s_load_reads_from_allowed_roots_only(world):
    load = {"lora_name": "x", "lora_path": "/etc"}

    answer = await world.http.post("/v1/load_lora_adapter", json=load)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")


async def test_models_are_the_base_and_then_its_adapters(world, peft_adapters):
    digest = (await world.push("pirate", peft_adapters["pirate"])).json()["digest"]
    await world.push("brief", peft_adapters["brief"])
    await world.push("gone", peft_adapters["json"])
    await world.http.delete("/v1/adapters/gone")

    models = (await world.http.get("/v1/models")).json()["data"]

    assert [model["id"] for model in models] == ["tiny", "tiny:brief", "tiny:pirate"]
    assert [model["parent"] for model in models] == [None, "tiny", "tiny"]
    assert models[2]["root"] == digest


async def test_workers_are_shown_with_what_their_core_says_now(world):
    (worker,) = (await world.http.get("/v1/workers")).json()["data"]

    assert worker["worker_id"] == "w-1"
    assert worker["state"] == "ready"
    assert worker["status"] == {"instance": "i-1", "num_blocks": 100, "adapters": []}
