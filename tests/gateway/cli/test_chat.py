"""The chat: streams, keeps its history, asks once for scripts."""

import io
import json

import pytest

from gateway.cli.chat import Conversation
from gateway.cli.client import ApiClient
from gateway.cli.output import Output

CHAT = "POST /v1/chat/completions"
DIGEST = "sha256:" + "ab" * 32


def chunk(text: str | None = None, finish_reason: str | None = None) -> dict:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
AHOY = [chunk("Ahoy"), chunk(" there!"), chunk(finish_reason="stop"), USAGE]


def test_one_message_is_streamed_to_stdout(cli, server):
    server.answer_events(CHAT, AHOY, x_loraplex_version=DIGEST)

    done = cli("chat", "SmolLM2:pirate", "-m", "Hello", "--system", "Be brief.", "--seed", "7")

    assert (done.exit_code, done.stdout) == (0, "Ahoy there!\n")
    assert server.asked[0].json == {
        "model": "SmolLM2:pirate",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "max_tokens": 512,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_json_says_what_ran_and_what_it_cost(cli, server):
    server.answer_events(CHAT, AHOY, x_loraplex_version=DIGEST, x_loraplex_worker="w-1")

    answer = json.loads(cli("chat", "SmolLM2:pirate", "-m", "Hello", "--json").stdout)

    assert answer.pop("ttft_s") <= answer.pop("total_s")
    assert answer == {
        "model": "SmolLM2:pirate",
        "version": DIGEST,
        "worker": "w-1",
        "text": "Ahoy there!",
        "finish_reason": "stop",
        "usage": USAGE["usage"],
    }


def test_without_a_model_the_first_one_is_asked(cli, server):
    server.answer("GET /v1/models", {"data": [{"id": "SmolLM2"}, {"id": "SmolLM2:pirate"}]})
    server.answer_events(CHAT, AHOY)

    assert cli("chat", "-m", "Hello").exit_code == 0

    assert server.asked[1].json["model"] == "SmolLM2"


def test_a_pipe_on_stdin_is_the_message(cli, server):
    server.answer_events(CHAT, AHOY)

    assert cli("chat", "SmolLM2", input="Hello\nyou\n").exit_code == 0

    assert server.asked[0].json["messages"] == [{"role": "user", "content": "Hello\nyou"}]


def test_unknown_model_is_told_in_the_servers_words(cli, server):
    error = {"message": "no model 'SmolLM2:nobody'", "code": "model_not_found"}
    server.answer(CHAT, {"error": error}, status=404)

    done = cli("chat", "SmolLM2:nobody", "-m", "Hello")

    assert done.exit_code == 1
    assert "no model 'SmolLM2:nobody'" in done.stderr


def test_error_event_within_the_stream_fails_the_command(cli, server):
    broken = {"error": {"message": "the worker's core ended", "code": "engine_unavailable"}}
    server.answer_events(CHAT, [chunk("Ahoy"), broken])

    done = cli("chat", "SmolLM2", "-m", "Hello", "--json")

    assert done.exit_code == 1
    assert json.loads(done.stdout) == broken


def test_stream_that_ends_without_done_fails_the_command(cli, server):
    server.answer_events(CHAT, [chunk("Ahoy")], done=False)

    done = cli("chat", "SmolLM2", "-m", "Hello")

    assert done.exit_code == 1
    assert "broke off before its end" in done.stderr


@pytest.fixture
def conversation(server, capsys):
    with ApiClient(url=server.url, key=None) as client:
        output = Output(as_json=False)
        yield Conversation(client, output, model="SmolLM2", system=None, options={})


def contents_of(asked) -> list[str]:
    return [message["content"] for message in asked.json["messages"]]


def test_conversation_keeps_its_history_until_it_is_cleared(conversation, server, monkeypatch):
    server.answer_events(CHAT, AHOY)
    lines = "one\ntwo\n/clear\nthree\n/model SmolLM2:pirate\nfour\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))

    conversation.run()

    assert [contents_of(asked) for asked in server.asked] == [
        ["one"],
        ["one", "Ahoy there!", "two"],
        ["three"],
        ["three", "Ahoy there!", "four"],
    ]
    assert server.asked[-1].json["model"] == "SmolLM2:pirate"


def test_refused_turn_leaves_the_history_as_it_was(conversation, server, monkeypatch, capsys):
    server.answer(CHAT, {"error": {"message": "too long"}}, status=400)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))

    conversation.run()

    assert [contents_of(asked) for asked in server.asked] == [["one"], ["two"]]
    assert "too long" in capsys.readouterr().err
