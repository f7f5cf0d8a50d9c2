"""vLLM's load and unload calls, and what may be loaded."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.server.conftest import RunningWorker, StartWorker

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NAME = "pirate@0123456789ab"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    for name in ("good", "other", "bad"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
async def loading(start_worker: StartWorker, root: Path) -> AsyncIterator[RunningWorker]:
    async with start_worker(allowed_roots=(str(root),)) as worker:
        yield worker


async def loaded(loading: RunningWorker) -> list[str]:
    response = await loading.client.get("/v1/models")
    return [card["id"] for card in response.json()["data"]]


async def test_loaded_adapter_serves_until_it_is_unloaded(loading: RunningWorker, root: Path):
    path = str(root / "good")
    for _ in range(2):
        response = await loading.post(LOAD, {"lora_name": NAME, "lora_path": path})
        assert response.status_code == 200
        assert response.text == f"Success: LoRA adapter '{NAME}' added successfully."
    body = {"model": NAME, "prompt": "ahoy"}
    assert (await loading.post("/v1/completions", body)).json()["model"] == NAME
    assert await loaded(loading) == ["tiny", NAME]
    card = (await loading.client.get("/v1/models")).json()["data"][1]
    assert card["parent"] == "tiny"
    assert (await loading.post("/tokenize", body)).status_code == 200

    response = await loading.post(UNLOAD, {"lora_name": NAME})
    assert response.text == f"Success: LoRA adapter '{NAME}' removed successfully."
    assert await loaded(loading) == ["tiny"]
    assert (await loading.post("/v1/completions", body)).status_code == 404
    assert (await loading.post("/tokenize", body)).status_code == 404
    assert (await loading.post(UNLOAD, {"lora_name": NAME})).status_code == 404


async def test_name_that_is_taken_needs_load_inplace(loading: RunningWorker, root: Path):
    body = {"lora_name": "taken", "lora_path": str(root / "good")}
    other = {"lora_name": "taken", "lora_path": str(root / "other")}
    assert (await loading.post(LOAD, body)).status_code == 200
    assert (await loading.post(LOAD, other)).status_code == 409
    assert (await loading.post(LOAD, {**other, "load_inplace": True})).status_code == 200
    assert (await loading.post(UNLOAD, {"lora_name": "taken"})).status_code == 200


async def test_refused_adapter_lists_every_problem(loading: RunningWorker, root: Path):
    response = await loading.post(LOAD, {"lora_name": NAME, "lora_path": str(root / "bad")})
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["code"] == "invalid_adapter"
    assert error["problems"] == ["q_proj: wrong shape", "k_proj: NaN"]
    assert await loaded(loading) == ["tiny"]


async def test_only_allowed_roots_are_read(loading: RunningWorker, root: Path, tmp_path: Path):
    (tmp_path / "secret").mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    (root.parent / (root.name + "-twin")).mkdir()
    for path in (
        str(tmp_path / "secret"),
        str(root / ".." / "elsewhere"),
        str(root / "link"),
        str(root) + "-twin",
        "good",
        "/etc",
        "/no/such/place",
    ):
        response = await loading.post(LOAD, {"lora_name": NAME, "lora_path": path})
        assert response.status_code == 403, path
        error = response.json()["error"]
        assert error["param"] == "lora_path"
        assert path not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_path": "{root}/absent"}, "lora_path"),
        ({"lora_path": "a\x00b"}, "lora_path"),
        ({"lora_path": 7}, "lora_path"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": "tiny"}, "lora_name"),
        ({"surprise": 1}, "surprise"),
    ],
)
async def test_bad_load_field_is_named(loading: RunningWorker, root: Path, fields, param):
    fields = {k: v.format(root=root) if isinstance(v, str) else v for k, v in fields.items()}
    body = {"lora_name": NAME, "lora_path": str(root / "good"), **fields}
    response = await loading.post(LOAD, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_nothing_may_be_loaded_by_default(running: RunningWorker, root: Path):
    response = await running.post(LOAD, {"lora_name": NAME, "lora_path": str(root / "good")})
    assert response.status_code == 403


async def test_probe_says_whether_a_loaded_version_does_anything(
    loading: RunningWorker, root: Path
):
    for name in ("loud@0123456789ab", "silent@0123456789ab"):
        await loading.post(LOAD, {"lora_name": name, "lora_path": str(root / "good")})
        answer = await loading.post("/internal/probe", {"lora_name": name})
        assert answer.status_code == 200
        assert answer.json()["has_effect"] is name.startswith("loud")
        assert answer.json()["noise"] == 0.0
        await loading.post(UNLOAD, {"lora_name": name})

    unknown = await loading.post("/internal/probe", {"lora_name": "nobody@0123456789ab"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    odd = await loading.post("/internal/probe", {"lora": "x"})
    assert odd.status_code == 400
