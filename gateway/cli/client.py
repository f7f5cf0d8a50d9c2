"""How commands talk to a running server."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec

from gateway.cli.output import EXIT_NO_SERVER, CliError

CONNECT_TIMEOUT_S = 5.0
# An upload is checked, and a cold adapter loaded, before the first byte of the answer.
READ_TIMEOUT_S = 300.0


class ApiClient:
    """One server, one key. Every failure is a CliError in words, with the right exit code."""

    def __init__(self, *, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                # A server that is named here is meant, whatever proxy the shell has set.
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise CliError(f"{url!r} isn't an address, or the key isn't plain text") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str, **arguments: Any) -> Any:
        """The decoded JSON answer; raises CliError for a refusal or when nothing answers."""
        with self._told(path):
            response = self._http.request(method, path, **arguments)
            _check(response)
            return _decoded(response)

    @contextmanager
    def stream(self, path: str, *, body: dict[str, Any]) -> Iterator[httpx.Response]:
        """An open event stream; leaving the block closes it, and the server stops working on it."""
        with self._told(path), self._http.stream("POST", path, json=body) as response:
            if response.status_code >= 400:
                response.read()
            _check(response)
            yield response

    @contextmanager
    def _told(self, path: str) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _no_server(self.url) from error
        except httpx.UnsupportedProtocol as error:
            raise CliError(f"{self.url!r} must begin with http:// or https://") from error
        except httpx.TimeoutException as error:
            message = f"{self.url}{path} took longer than {READ_TIMEOUT_S:.0f} s to answer"
            raise CliError(message) from error
        except httpx.HTTPError as error:
            raise CliError(f"{self.url} broke the connection off ({error})") from error


def _no_server(url: str) -> CliError:
    message = (
        f"no Loraplex server answers at {url}; start one with `loraplex serve`, or say where it "
        "is with --url or LORAPLEX_URL"
    )
    return CliError(
        message,
        exit_code=EXIT_NO_SERVER,
        body={"error": {"message": message, "code": "no_server"}},
    )


def _check(response: httpx.Response) -> None:
    if response.status_code < 400:
        return
    body = _decoded(response)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        message = f"the server answered {response.status_code} without saying why"
        raise CliError(message, body={"error": {"message": message, "code": "bad_answer"}})
    lines = [error["message"]]
    problems = error.get("problems") or []
    if len(problems) > 1:
        lines = [f"{len(problems)} problems:", *(f"  - {problem}" for problem in problems)]
    if response.status_code in (401, 403):
        lines.append("give a key with --api-key, LORAPLEX_ADMIN_KEY or LORAPLEX_API_KEY")
    raise CliError("\n".join(lines), body=body)


def _decoded(response: httpx.Response) -> Any:
    try:
        return msgspec.json.decode(response.content)
    except msgspec.MsgspecError:
        if response.status_code >= 400:
            return None
        raise CliError("the answer isn't JSON; is this address really a Loraplex server?") from None
