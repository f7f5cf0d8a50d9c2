"""Health, status, base, tokens, metrics; and the cluster token before all of them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.server.app import ROUTES
from engine.server.tokenizer_info import tokenizer_info
from tests.engine.server.conftest import RunningWorker, StartWorker
from tests.engine.server.tiny_model import BOS, CHAT_TEMPLATE, END

pytestmark = pytest.mark.anyio


async def test_health_and_models(running: RunningWorker):
    assert (await running.client.get("/health")).json() == {"status": "ok"}
    card = (await running.client.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["parent"], card["max_model_len"]) == ("tiny", None, 128)


async def test_status_and_base(running: RunningWorker):
    status = (await running.client.get("/internal/status")).json()
    assert status["instance"] == running.worker.supervisor.instance
    assert status["num_free_blocks"] == status["num_blocks"] == 64
    base = (await running.client.get("/internal/base")).json()
    assert base["base_id"] == "tiny"
    assert base["identity"].startswith("sha256:")
    assert base["modules"]["q_proj"] == {"in_features": 8, "out_features": 8}


async def test_tokenize_and_back(running: RunningWorker, tokenizer):
    answer = (await running.post("/tokenize", {"model": "tiny", "prompt": "the 好 fox"})).json()
    assert answer["tokens"] == tokenizer.encode_now("the 好 fox", add_special_tokens=True)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
    text = (await running.post("/detokenize", {"tokens": answer["tokens"]})).json()
    assert text == {"prompt": "the 好 fox"}


async def test_tokenize_messages_as_chat_does(running: RunningWorker):
    messages = [{"role": "user", "content": "hi"}]
    answer = (await running.post("/tokenize", {"messages": messages})).json()
    chat = {"model": "tiny", "messages": messages}
    usage = (await running.post("/v1/chat/completions", chat)).json()["usage"]
    assert answer["count"] == usage["prompt_tokens"]
    body = {"messages": messages, "add_generation_prompt": False}
    assert (await running.post("/tokenize", body)).json()["count"] < answer["count"]


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}]
)
async def test_tokenize_wants_one_of_two(running: RunningWorker, body):
    assert (await running.post("/tokenize", body)).status_code == 400


async def test_metrics_count_and_show_the_core(running: RunningWorker):
    await running.post("/v1/completions", {"model": "tiny", "prompt": "count me"})
    text = (await running.client.get("/metrics")).text
    samples = {
        (sample.name, *sample.labels.values()): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["loraplex_requests_total", "completions", "finished"].value >= 1
    assert samples["loraplex_generation_tokens_total",].value >= 1
    assert samples["loraplex_time_to_first_token_seconds_count",].value >= 1
    assert samples["loraplex_core_up",].value == 1
    assert samples["vllm:num_requests_running", "tiny"].value == 0
    assert samples["vllm:num_requests_waiting", "tiny"].value == 0
    assert samples["vllm:gpu_cache_usage_perc", "tiny"].value == 0
    assert samples["vllm:lora_requests_info", "64", "", ""].value > 1e9


async def test_every_route_but_health_wants_the_cluster_token(start_worker: StartWorker):
    async with start_worker(cluster_token="s3cret") as running:
        for route in ROUTES:
            for method in sorted(route.methods or ()):
                response = await running.client.request(method, route.path)
                expected = 200 if route.path == "/health" else 401
                assert response.status_code == expected, route.path
                assert response.headers["x-loraplex-instance"]
        for wrong in ("s3cret", "Bearer s3cre", "Bearer s3crets", "bearer s3cret", "Bearer ü"):
            headers = {"authorization": wrong.encode()}
            assert (await running.client.get("/v1/models", headers=headers)).status_code == 401
        right = {"authorization": "Bearer s3cret"}
        assert (await running.client.get("/v1/models", headers=right)).status_code == 200
        assert (await running.client.get("/no/such/route")).status_code == 401


async def test_unforeseen_error_shows_nothing(running: RunningWorker, monkeypatch, caplog):
    def fail(*_args: object, **_more: object) -> None:
        raise RuntimeError("the prompt was 'my secret'")

    monkeypatch.setattr("engine.server.chat.render_messages", fail)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    response = await running.post("/v1/chat/completions", body)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


async def test_tokenizer_info_has_what_renders_a_prompt(running: RunningWorker):
    info = (await running.client.get("/tokenizer_info")).json()
    assert info["chat_template"] == CHAT_TEMPLATE
    assert (info["bos_token"], info["eos_token"]) == (BOS, END)
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_tokenizer_info_names_no_files_of_another_machine():
    config = {
        "name_or_path": "/home/somebody/model",
        "special_tokens_map_file": "/home/somebody/map.json",
        "tokenizer_file": None,
        "tokenizer_class": "LlamaTokenizer",
        "model_max_length": 2048,
    }
    info = tokenizer_info(config, chat_template=None)
    assert info == {"tokenizer_class": "LlamaTokenizer", "model_max_length": 2048}
