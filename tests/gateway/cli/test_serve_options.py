"""What `serve` is told, checked before anything starts."""

from dataclasses import replace

import pytest
import typer

from gateway.cli import serve_options
from gateway.cli.serve import CHOICES, engine_options
from gateway.cli.serve_options import (
    EngineOptions,
    find_demo_adapters,
    is_loopback,
    parse_adapters,
    parse_memory,
    resolve_model,
)
from gateway.embedded import machine
from gateway.embedded.errors import ServeRefused


def engine_on(device: str) -> EngineOptions:
    return EngineOptions(
        model="model",
        served_model_name=None,
        dtype="auto",
        device=device,
        max_model_len=None,
        max_num_seqs=64,
        max_tokens_per_step=512,
        block_size=16,
        memory_bytes=None,
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (None, None),
        ("2GiB", 2 << 30),
        ("2 gb", 2 << 30),
        ("1.5G", 3 << 29),
        ("512MiB", 512 << 20),
        ("134217728", 128 << 20),
    ],
)
def test_memory_is_bytes_with_a_unit(text, num_bytes):
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["much", "-1G", "0.9", "2GiBB", ""])
def test_memory_that_is_no_useful_size_is_a_usage_error(text):
    with pytest.raises(typer.BadParameter):
        parse_memory(text)


def test_no_model_is_the_default_base_under_its_public_name():
    model, name = resolve_model(None, None)

    assert model.endswith(".gguf")
    assert name == "SmolLM2-135M-Instruct"


def test_local_model_is_given_to_workers_as_an_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)

    assert resolve_model("model", "mine") == (str(tmp_path / "model"), "mine")


def test_hub_id_is_left_as_it_is():
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct", None)[0].startswith("Hugging")


@pytest.mark.parametrize("model", ["/no/such/place", "./missing", "a/b.gguf", "one", "a/b/c"])
def test_model_that_is_not_there_is_one_line(model):
    with pytest.raises(ServeRefused, match="no such model: "):
        resolve_model(model, None)


def test_several_workers_share_cores_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_options.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8 << 30)
    engine = engine_on("cpu")

    alone = engine.as_config(state_dir=tmp_path)
    shared = engine.as_config(state_dir=tmp_path, num_workers=4)

    assert (alone["num_threads"], alone["memory_bytes"]) == (None, None)
    assert (shared["num_threads"], shared["memory_bytes"]) == (2, 1 << 30)


def test_workers_on_cuda_are_told_their_place_and_measure_for_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8 << 30)
    engine = engine_on("cuda")

    second = engine.as_config(state_dir=tmp_path, worker_index=1, num_workers=4)
    told = replace(engine, memory_bytes=3 << 30).as_config(
        state_dir=tmp_path, worker_index=1, num_workers=4
    )

    assert (second["worker_index"], second["num_workers"]) == (1, 4)
    assert second["memory_bytes"] is None
    assert told["memory_bytes"] == 3 << 30


def test_number_of_threads_that_was_given_is_each_workers(tmp_path):
    engine = EngineOptions(
        model="model",
        served_model_name=None,
        dtype="auto",
        device="cpu",
        max_model_len=None,
        max_num_seqs=64,
        max_tokens_per_step=512,
        block_size=16,
        memory_bytes=None,
        num_threads=3,
    )

    assert engine.as_config(state_dir=tmp_path)["num_threads"] == 3
    assert engine.as_config(state_dir=tmp_path, num_workers=2)["num_threads"] == 3


def test_choices_reach_the_engine_and_unknown_ones_are_usage_errors(tmp_path):
    given = {
        "model": str(tmp_path),
        "served_model_name": None,
        "dtype": "bf16",
        "device": "cuda",
        "attention": "triton",
        "scheduling": "fcfs",
        "max_model_len": None,
        "max_num_seqs": 64,
        "max_tokens_per_step": 512,
        "block_size": 16,
        "memory": None,
        "num_threads": None,
    }

    config = engine_options(given).as_config(state_dir=tmp_path)

    assert {name: config[name] for name in CHOICES} == {name: given[name] for name in CHOICES}
    for name in CHOICES:
        with pytest.raises(typer.BadParameter, match=f"--{name} must be .* or .*, not 'x'"):
            engine_options(given | {name: "x"})


def test_named_adapters_are_promoted(tmp_path):
    (source,) = parse_adapters([f"pirate={tmp_path}"])

    assert (source.name, source.path, source.promote) == ("pirate", tmp_path, True)


@pytest.mark.parametrize("text", ["pirate", "=path", "pirate="])
def test_adapter_without_name_or_path_is_a_usage_error(text):
    with pytest.raises(typer.BadParameter, match="NAME=PATH"):
        parse_adapters([text])


def test_adapter_path_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ServeRefused, match="there's no adapter at"):
        parse_adapters([f"pirate={tmp_path / 'nothing'}"])


def test_demo_adapters_are_the_complete_ones_of_the_current_folder(tmp_path, monkeypatch):
    for name, files in {
        "json": ["adapter_config.json", "adapter_model.safetensors"],
        "half": ["adapter_config.json"],
        "none": [],
    }.items():
        folder = tmp_path / "examples" / "adapters" / name
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).touch()
    monkeypatch.chdir(tmp_path)

    (found,) = find_demo_adapters()

    assert (found.name, found.promote) == ("json", False)


def test_no_demo_adapters_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve_options, "__file__", str(tmp_path / "a" / "b" / "c.py"))

    assert find_demo_adapters() == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_hosts_need_no_key(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_hosts_are_not_loopback(host):
    assert not is_loopback(host)
