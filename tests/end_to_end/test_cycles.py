"""Load, use, unload, again and again: nothing grows, nothing stays."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from engine.llm import LLM
from engine.protocol import SamplingParams
from gateway.cli.app import app
from tests.end_to_end.peft_reference import save_random_adapter, save_tiny_llama
from tests.end_to_end.processes import Memory, command_of, descendants_of
from tests.end_to_end.serving import serving
from tests.end_to_end.token_streams import greedy_body, stream_tokens, token_ids_of
from tests.waiting import eventually

BASE = "tiny"
PROMPT = [5, 6, 7]
MIB = 1024**2
MAX_SLOPE_BYTES = 1024
DRAINING = ["draining"]
# Tokens of a stream that is still running when a few other things have been done.
LONG = 2000
# An adapter of this rank has a megabyte.
LORA = {"r": 56, "lora_alpha": 16, "target_modules": "all-linear"}
needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with the tiny base and two adapters of a megabyte each."""
    root = tmp_path_factory.mktemp("cycles")
    save_tiny_llama(root / "base", max_positions=2 * LONG)
    for seed, name in enumerate("ab"):
        save_random_adapter(root / "base", root / name, seed=seed, **LORA)
    assert (root / "a" / "adapter_model.safetensors").stat().st_size > 0.95 * MIB
    return root


def settings(world, state_dir) -> dict:
    return {
        "model": str(world / "base"),
        "state_dir": str(state_dir),
        "dtype": "fp32",
        "num_threads": 1,
        "memory_bytes": 32 * MIB,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_tokens_per_step": 32,
    }


def processes_of(pid: int) -> dict[str, int]:
    """The Python processes below `pid`, by the last word of the module that they run."""
    found = {}
    for child in descendants_of(pid):
        module = command_of(child).partition(" -m ")[2].partition(" ")[0]
        if module.startswith("engine."):
            found[module.rpartition(".")[2]] = child
    return found


def assert_empty(status) -> None:
    """Assert that every pool is as it was at the start."""
    assert status.num_free_blocks == status.num_blocks
    assert status.free_lora_rows == status.lora_rows
    assert status.adapters == []


@pytest.mark.slow
def test_core_keeps_nothing_of_300_adapters_that_came_and_went(world, tmp_path):
    run_core_cycles(world, tmp_path, num_cycles=300)


@needs_proc
@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_core_does_not_grow_in_10000_cycles(world, tmp_path):
    slopes = run_core_cycles(world, tmp_path, num_cycles=10_000)

    assert max(slopes.values()) <= MAX_SLOPE_BYTES, slopes


def run_core_cycles(world, state_dir, *, num_cycles: int) -> dict[str, float]:
    """Load, use and unload under a new name each time; return bytes gained a cycle by process."""
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    config = settings(world, state_dir)
    with LLM(config.pop("model"), **config) as llm:
        memory = Memory({"core": os.getpid()} | processes_of(os.getpid()))
        for number in range(num_cycles):
            lora_id = f"cycle@{number:012x}"
            llm.load_adapter(lora_id, world / "ab"[number % 2])
            llm.generate([PROMPT], params, lora_ids=[lora_id])
            llm.unload_adapter(lora_id)
            memory.sample()
        llm.core.step()
        llm.core.check_invariants()
        status = llm.status()
        images = list(state_dir.rglob("*.arena"))

    assert status.num_adapter_loads == num_cycles
    assert_empty(status)
    assert images == []
    return memory.slopes(settled_after=0.2)


@pytest.fixture(scope="module")
def server(world):
    with serving(
        str(world / "base"),
        f"--served-model-name={BASE}",
        *("--dtype=fp32", "--memory=128MiB", "--num-threads=1", "--max-num-seqs=2"),
        f"--allowed-root={world}",
        state_dir=world / "state",
        log=world / "serve.log",
    ) as running:
        yield running


def core_status(server) -> dict:
    with server.client() as http:
        return http.get("/v1/workers").raise_for_status().json()["data"][0]["status"]


def holds_of(status: dict) -> list[tuple[int, int]]:
    return [(one["num_leases"], one["num_claims"]) for one in status["adapters"]]


def ps(server) -> list[list[str]]:
    """The cells of `loraplex ps`, line by line."""
    result = CliRunner().invoke(app, ["ps", "--url", server.url], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.output.splitlines() if line.strip()]


@pytest.mark.slow
def test_deleted_adapter_refuses_queued_requests_and_ends_when_running_ones_do(world, server):
    with server.client() as http:
        body = {"name": "busy", "path": str(world / "a")}
        http.post("/v1/adapters", json=body).raise_for_status()
    # What it imports is imported now: later, streams would end meanwhile.
    assert ps(server)

    async def everything():
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
            running = [
                asyncio.create_task(
                    stream_tokens(http, model=f"{BASE}:busy", prompt_ids=PROMPT, max_tokens=LONG)
                )
                for _ in range(2)
            ]
            await reaches(server, [(2, 0)])
            body = greedy_body(f"{BASE}:busy", PROMPT, max_tokens=LONG)
            queued = [
                asyncio.create_task(http.post("/v1/completions", json=body | {"stream": streams}))
                for streams in (False, True, False)
            ]
            await reaches(server, [(2, 3)])
            shown = await asyncio.to_thread(ps, server)
            (await http.delete("/v1/adapters/busy")).raise_for_status()
            refused = await asyncio.gather(*queued)
            assert not any(stream.done() for stream in running), "too short to show anything"
            late = await http.post("/v1/completions", json=body)
            return shown, refused, late, await asyncio.gather(*running)

    shown, refused, late, finished = asyncio.run(everything())

    assert shown[-2][-2:] == ["LEASES", "CLAIMS"]
    assert shown[-1][-4:] == ["resident", "56", "2", "3"]
    assert [answer.status_code for answer in refused] == [409] * 3
    assert {answer.json()["error"]["code"] for answer in refused} == {"adapter_unloaded"}
    assert (late.status_code, late.json()["error"]["code"]) == (404, "model_not_found")
    assert finished[0].token_ids == finished[1].token_ids
    eventually(lambda: core_status(server)["adapters"] == [])


@pytest.mark.slow
def test_content_that_was_deleted_under_a_stream_may_come_back_at_once(world, server):
    """The stream still holds the version, so the worker is about to forget what it gets again."""
    upload = {"name": "back", "path": str(world / "a")}

    async def everything():
        async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
            first = (await http.post("/v1/adapters", json=upload)).raise_for_status().json()
            stream = asyncio.create_task(
                stream_tokens(http, model=f"{BASE}:back", prompt_ids=PROMPT, max_tokens=LONG)
            )
            await reaches(server, [(1, 0)])
            (await http.delete("/v1/adapters/back")).raise_for_status()
            await asyncio.to_thread(eventually, lambda: states_of(core_status(server)) == DRAINING)
            assert not stream.done(), "too short to show anything"

            again = await http.post("/v1/adapters", json=upload)
            body = greedy_body(f"{BASE}:back", PROMPT, max_tokens=LONG)
            answer = await http.post("/v1/completions", json=body)
            return first, await stream, again, answer

    first, streamed, again, answer = asyncio.run(everything())

    assert (again.status_code, again.json()["state"]) == (201, "active")
    assert again.json()["digest"] == first["digest"] == answer.headers["x-loraplex-version"]
    assert token_ids_of(answer.json()["choices"][0]["text"]) == streamed.token_ids
    with server.client() as http:
        http.delete("/v1/adapters/back").raise_for_status()
    eventually(lambda: core_status(server)["adapters"] == [])


def states_of(status: dict) -> list[str]:
    return [one["state"] for one in status["adapters"]]


async def reaches(server, holds: list[tuple[int, int]]) -> None:
    """Wait until the worker's adapters have as many leases and claims."""
    await asyncio.to_thread(eventually, lambda: holds_of(core_status(server)) == holds)


@pytest.mark.slow
def test_server_keeps_nothing_of_30_adapters_that_came_and_went(world, server):
    run_http_cycles(world, server, num_cycles=30)


@needs_proc
@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_server_does_not_grow_in_2000_cycles(world, server):
    """Half of them is what allocators need until they give out no new pages."""
    slopes = run_http_cycles(world, server, num_cycles=2000)

    assert max(slopes.values()) <= MAX_SLOPE_BYTES, slopes


def run_http_cycles(world, server, *, num_cycles: int) -> dict[str, float]:
    """vLLM's calls, as a trainer makes them; return bytes gained a cycle by process."""
    memory = Memory({"gateway": server.process.pid} | processes_of(server.process.pid))
    body = greedy_body(f"{BASE}:cycle", PROMPT, max_tokens=2)
    with server.client() as http:
        for number in range(num_cycles):
            path = str(world / "ab"[number % 2])
            load = {"lora_name": "cycle", "lora_path": path}
            http.post("/v1/load_lora_adapter", json=load).raise_for_status()
            http.post("/v1/completions", json=body).raise_for_status()
            unload = {"lora_name": "cycle"}
            http.post("/v1/unload_lora_adapter", json=unload).raise_for_status()
            memory.sample()
        assert http.get("/v1/adapters").json()["data"] == []
    eventually(lambda: core_status(server)["adapters"] == [])
    status = core_status(server)

    assert status["num_free_blocks"] == status["num_blocks"]
    assert status["free_lora_rows"] == status["lora_rows"]
    assert list((world / "state").rglob("*.arena")) == []
    return memory.slopes(settled_after=0.5)
