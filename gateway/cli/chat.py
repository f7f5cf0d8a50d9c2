"""`loraplex chat`: talk to a base or an adapter in the terminal."""

import sys
from typing import Annotated, Any

import typer

from gateway.cli.chat_stream import Answer, stream_answer
from gateway.cli.client import ApiClient
from gateway.cli.flags import DEFAULT_URL, JsonFlag, KeyFlag, UrlFlag
from gateway.cli.output import CliError, Output, reporting

HELP = "/clear forgets the history, /model NAME changes the model, /exit or Ctrl-D ends"


def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="BASE:ADAPTER", help="Whom to talk to; by default the base."),
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this one thing and end.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1)] = 512,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, max=2)] = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    url: UrlFlag = DEFAULT_URL,
    api_key: KeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Chat in the terminal; with --message, or a pipe on stdin, ask once."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        talk = Conversation(
            client,
            output,
            model=model or _first_model(client),
            system=system,
            options={name: value for name, value in options.items() if value is not None},
        )
        if message is None and not sys.stdin.isatty():
            message = sys.stdin.read().strip()
            if not message:
                raise CliError("nothing came on stdin; give a message with --message")
        if message is not None:
            answer = talk.ask(message)
            if json:
                output.json(answer)
        elif json:
            raise CliError("--json wants one message: give it with --message")
        else:
            talk.run()


def _first_model(client: ApiClient) -> str:
    models = client.request("GET", "/v1/models")["data"]
    if not models:
        raise CliError("the server has no model yet; look at `loraplex ps`")
    return str(models[0]["id"])


class Conversation:
    """One chat: its model and its history. A turn that fails or is stopped isn't kept."""

    def __init__(
        self,
        client: ApiClient,
        output: Output,
        *,
        model: str,
        system: str | None,
        options: dict[str, Any],
    ) -> None:
        self._client = client
        self._output = output
        self._model = model
        self._options = options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._history: list[dict[str, str]] = []

    def ask(self, message: str) -> Answer:
        """Stream one answer to the terminal and keep both in the history."""
        question = {"role": "user", "content": message}
        body = {
            "model": self._model,
            "messages": [*self._system, *self._history, question],
            **self._options,
        }
        show = _show_nothing if self._output.as_json else _show
        answer = stream_answer(self._client, body, show=show)
        self._output.line("")
        self._history += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def run(self) -> None:
        """Ask for messages until the person ends it."""
        _use_readline()
        self._output.line(f"{self._model} — {HELP}")
        while True:
            try:
                message = input("> ").strip()
            except EOFError:
                self._output.line("")
                return
            except KeyboardInterrupt:
                self._output.line("")
                continue
            if message in {"/exit", "/quit"}:
                return
            if message:
                self._turn(message)

    def _turn(self, message: str) -> None:
        if message.startswith("/"):
            self._command(message)
            return
        try:
            answer = self.ask(message)
        except KeyboardInterrupt:
            self._output.line("")
            self._output.remark("stopped; this turn is forgotten")
        except CliError as error:
            # A refused turn leaves the conversation as it was; the person may try another model.
            self._output.error(error)
        else:
            self._output.remark(answer.summary)

    def _command(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        if word == "/clear":
            self._history.clear()
            self._output.remark("the history is empty")
        elif word == "/model" and rest.strip():
            self._model = rest.strip()
            self._output.remark(f"now talking to {self._model}")
        else:
            self._output.remark(HELP)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_nothing(text: str) -> None:
    pass


def _use_readline() -> None:
    try:
        import readline  # noqa: F401 - importing it gives input() line editing and history
    except ImportError:
        return
