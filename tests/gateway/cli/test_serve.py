"""`loraplex serve` as a process: what it tells, how it stops, what it refuses."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.processes import command_of
from tests.gateway.embedded.worlds import is_alive
from tests.waiting import eventually

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "tests.gateway.cli.loraplex_with_joining_worker"]
EXAMPLES = Path(__file__).parents[3] / "examples" / "adapters"
CHECKOUT = Path(__file__).parents[3]


class Serve:
    """A running command; reads its events one by one."""

    def __init__(self, process: subprocess.Popen):
        self.process = process
        self.events: list[dict] = []

    def read_until(self, kind: str) -> dict:
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == kind:
                return self.events[-1]
        raise AssertionError(f"no {kind}: {self.events} {self.process.stderr.read().decode()}")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@pytest.fixture
def start(tmp_path):
    (tmp_path / "run").mkdir()

    @contextmanager
    def run(
        *arguments: str,
        command: str = "serve",
        behaviour: str = "join",
        state: str = "state",
        **environment: str,
    ):
        variables = {
            "SCRIPTED_BEHAVIOUR": behaviour,
            "XDG_RUNTIME_DIR": str(tmp_path / "run"),
            "LORAPLEX_STATE_DIR": str(tmp_path / state),
            "PYTHONPATH": str(CHECKOUT),
        }
        process = subprocess.Popen(
            [*COMMAND, command, "--json", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables, **environment},
            cwd=tmp_path,
        )
        with process:
            try:
                yield Serve(process)
            finally:
                process.kill()

    return run


@pytest.fixture
def model(tmp_path) -> str:
    made = tmp_path / "model.gguf"
    made.touch()
    return str(made)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_serve_tells_where_it_is_and_ends_all_it_started(start, model, number):
    with start(model) as serve:
        ready = serve.read_until("ready")
        gateway, valkey, (worker,) = ready["pids"].values()
        assert gateway == serve.process.pid
        assert all(is_alive(pid) for pid in (valkey, worker))
        health = httpx.get(ready["url"] + "/health", trust_env=False)
        assert health.json() == {"status": "ok", "registry": "ok", "workers": 1}
        assert ready["models"] == ["SmolLM2-135M-Instruct"]

        assert serve.end(number) == 0

        serve.read_until("stopped")
    assert not any(is_alive(pid) for pid in (valkey, worker))
    assert [event["event"] for event in serve.events] == [
        "settings",
        *["progress"] * 4,
        "worker",
        "ready",
        "stopping",
        "stopped",
    ]


def test_settings_are_told_with_their_source(start, model):
    with start(model, "--max-num-seqs", "8", LORAPLEX_DTYPE="fp32") as serve:
        told = serve.read_until("settings")

    shown = {name: (told["values"][name], told["sources"][name]) for name in told["values"]}
    assert shown["max-num-seqs"] == ("8", "option")
    assert shown["dtype"] == ("fp32", "environment")
    assert shown["max-tokens-per-step"] == ("512", "default")
    assert shown["redis-url"] == ("a private Valkey", "default")


def test_keys_are_told_only_as_given(start, model):
    with start(model, "--api-key", "sesame", LORAPLEX_ADMIN_KEY="opensesame") as serve:
        told = serve.read_until("settings")

    assert told["values"]["api-key"] == told["values"]["admin-key"] == "given"
    assert "sesame" not in json.dumps(told)


def test_second_signal_ends_at_once(start, model):
    with start(model, behaviour="stubborn") as serve:
        pids = serve.read_until("ready")["pids"]
        serve.process.send_signal(signal.SIGINT)
        serve.read_until("stopping")

        assert serve.end(signal.SIGINT) == 1

    eventually(lambda: not is_alive(pids["valkey"]) and not is_alive(pids["workers"][0]))


def test_signal_while_the_model_loads_ends_everything(start, model):
    with start(model, behaviour="load") as serve:
        while serve.read_until("progress")["text"] != "loading the model":
            continue

        assert serve.end(signal.SIGTERM) == 0

        serve.read_until("stopped")


def test_killed_worker_serves_again_and_is_told(start, model):
    with start(model) as serve:
        ready = serve.read_until("ready")
        os.kill(ready["pids"]["workers"][0], signal.SIGKILL)

        assert serve.read_until("ended")["reason"] == "killed by SIGKILL"
        restarted = serve.read_until("restarted")

        assert restarted["name"] == "worker-0"
        assert httpx.get(ready["url"] + "/health", trust_env=False).status_code == 200
        assert serve.end(signal.SIGTERM) == 0


def test_adapters_are_pushed_once_and_outlive_a_restart(start, model):
    adapters = [f"--adapter={name}={EXAMPLES / name}" for name in ("json", "pirate")]
    with start(model, *adapters) as serve:
        first = serve.read_until("ready")
        serve.end(signal.SIGTERM)

    with start(model, adapters[1]) as serve:
        second = serve.read_until("ready")
        pushed = [event["text"] for event in serve.events if event.get("step") == "adapter"]
        serve.end(signal.SIGTERM)

    assert first["models"] == second["models"]
    assert second["models"][1:] == [f"SmolLM2-135M-Instruct:{name}" for name in ("json", "pirate")]
    assert [text.partition(":")[0] for text in pushed] == ["pirate@v1"]


def test_data_key_alone_shuts_the_admin_routes_but_lets_the_start_push(start, model):
    adapter = f"--adapter=json={EXAMPLES / 'json'}"
    with start(model, adapter, "--api-key", "sesame") as serve:
        ready = serve.read_until("ready")
        with httpx.Client(base_url=ready["url"], trust_env=False) as client:
            key = {"authorization": "Bearer sesame"}
            assert client.get("/v1/adapters", headers=key).status_code == 403
            assert client.get("/v1/models").status_code == 401
            assert len(client.get("/v1/models", headers=key).json()["data"]) == 2
        serve.end(signal.SIGTERM)


def test_server_outlives_the_pipe_that_its_words_went_to(start, model):
    with start(model) as serve:
        ready = serve.read_until("ready")
        serve.process.stdout.close()
        os.kill(ready["pids"]["workers"][0], signal.SIGKILL)

        eventually(lambda: heartbeats_of(ready) not in ([], [ready["pids"]["workers"][0]]))

        assert serve.end(signal.SIGTERM) == 0


def heartbeats_of(ready: dict) -> list[int]:
    """The pids of the workers that the gateway knows; the joining worker tells its own."""
    answer = httpx.get(ready["url"] + "/v1/workers", trust_env=False).json()
    return [int(worker["instance"].removeprefix("pid-")) for worker in answer["data"]]


def test_worker_command_joins_the_gateway_of_a_given_registry(start, model, tmp_path):
    with start(model) as serve:
        ready = serve.read_until("ready")
        shared = ["--redis-url", ready["redis_url"], "--store", str(tmp_path / "state" / "store")]
        with start(model, *shared, command="worker", state="other") as worker:
            joined = worker.read_until("worker")["pid"]
            assert ready["redis_url"] not in command_of(joined)
            eventually(lambda: joined in heartbeats_of(ready))

            assert worker.end(signal.SIGTERM) == 0

        assert not is_alive(joined)
        serve.end(signal.SIGTERM)


def test_second_gateway_serves_from_a_given_registry(start, model):
    with start(model) as first:
        redis_url = first.read_until("ready")["redis_url"]
        with start(model, "--redis-url", redis_url, state="other") as second:
            ready = second.read_until("ready")
            assert ready["pids"]["valkey"] is None
            assert len(heartbeats_of(ready)) == 2
            second.end(signal.SIGTERM)
        first.end(signal.SIGTERM)


def refusal_of(serve: Serve) -> str:
    """The one line that a refused start tells; nothing else is on stderr."""
    message = serve.read_until("failed")["message"]
    assert serve.process.wait(timeout=30) == 1
    assert serve.process.stderr.read() == b""
    return message


def test_worker_that_refuses_is_one_line_and_nothing_is_left(start, model):
    with start(model, behaviour="refuse") as serve:
        assert refusal_of(serve) == "worker-0 can't start: GPTQ checkpoints aren't served"
        registry = next(event for event in serve.events if event.get("step") == "registry")

    assert not is_alive(int(re.search(r"pid (\d+)", registry["text"])[1]))


def test_taken_port_is_one_line(start, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start(model, "--port", str(port)) as serve:
            message = refusal_of(serve)

    assert message.startswith(f"port {port} on 127.0.0.1 is taken; choose another with --port")


def test_state_folder_in_use_is_one_line(start, model):
    with start(model) as first:
        first.read_until("ready")
        with start(model) as second:
            message = refusal_of(second)

    assert f"(pid {first.process.pid})" in message


def test_host_that_others_reach_needs_keys(start, model):
    with start(model, "--host", "0.0.0.0") as serve:
        assert "keys are needed" in refusal_of(serve)


def test_host_of_another_machine_is_one_line(start, model):
    with start(model, "--host", "192.0.2.1", "--api-key", "sesame") as serve:
        assert "isn't an address of this machine" in refusal_of(serve)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://user:secret@127.0.0.1:9/0", "no Redis or Valkey answers at 127.0.0.1:9"),
        ("unix:///no/such.sock", "no Redis or Valkey answers at /no/such.sock"),
        ("127.0.0.1:6379", "--redis-url must begin with redis://"),
    ],
)
def test_registry_that_does_not_answer_is_one_line_without_its_password(start, model, url, words):
    with start(model, "--redis-url", url) as serve:
        message = refusal_of(serve)

    assert message.startswith(words)
    assert "secret" not in json.dumps(serve.events)


def test_missing_model_is_one_line(start):
    with start("./no-such-model") as serve:
        assert refusal_of(serve).startswith("no such model: ./no-such-model")


def test_refused_adapter_names_its_problems(start, model, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{}")
    with start(model, f"--adapter=broken={tmp_path / 'broken'}") as serve:
        message = refusal_of(serve)

    assert message.startswith("--adapter broken=")
    assert "adapter_model.safetensors" in message


def test_valkey_that_cannot_start_is_one_line(start, model, tmp_path):
    data = tmp_path / "state" / "valkey"
    data.mkdir(parents=True)
    (data / "appendonlydir").touch()
    with start(model) as serve:
        assert "registry's server (Valkey) can't start" in refusal_of(serve)


def test_wrong_option_value_is_a_usage_error(start, model):
    with start(model, "--memory", "much") as serve:
        assert serve.process.wait(timeout=30) == 2
