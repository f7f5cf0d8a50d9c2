"""`loraplex adapter …`: upload, look at, promote, roll back and retire adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.cli.adapter_files import choose_files, opened
from gateway.cli.client import ApiClient
from gateway.cli.flags import DEFAULT_URL, AdminKeyFlag, JsonFlag, UrlFlag
from gateway.cli.output import Output, human_bytes, plain_table, reporting

app = typer.Typer(no_args_is_help=True, help="Upload, compare, promote and roll back adapters.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name.")]
AliasFlag = Annotated[str, typer.Option("--alias", help="The alias that moves.")]


def push_adapter(
    client: ApiClient,
    *,
    name: str,
    paths: Sequence[Path],
    base: str | None,
    promote: bool,
    allow_no_effect: bool = False,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Upload one adapter; returns the server's answer and the names that were not sent."""
    chosen = choose_files(paths)
    fields = {"name": name}
    if base is not None:
        fields["base"] = base
    if promote:
        fields["promote"] = "true"
    if allow_no_effect:
        fields["allow_no_effect"] = "true"
    with opened(chosen.sent) as parts:
        answer = client.request("POST", "/v1/adapters", data=fields, files=parts)
    return answer, chosen.left


@app.command("push")
def push(
    name: NameArgument,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH…", help="A PEFT directory, its files, or a tar or zip."),
    ],
    promote: Annotated[
        bool, typer.Option("--promote", help="Move the alias `default` to it.")
    ] = False,
    base: Annotated[str | None, typer.Option("--base", help="The base it was trained for.")] = None,
    allow_no_effect: Annotated[
        bool, typer.Option("--allow-no-effect", help="Serve it even if it changes nothing.")
    ] = False,
    url: UrlFlag = DEFAULT_URL,
    api_key: AdminKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Upload an adapter; the same content twice is the same version."""
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        answer, left = push_adapter(
            client,
            name=name,
            paths=paths,
            base=base,
            promote=promote,
            allow_no_effect=allow_no_effect,
        )
        if json:
            output.json({**answer, "not_sent": list(left)})
            return
        output.line(
            f"{answer['name']}@{answer['version']} is {answer['state']}: "
            f"{answer['coverage']}, rank {answer['max_rank']}, "
            f"{human_bytes(answer['num_bytes'])}, {answer['digest'][:19]}"
        )
        if answer["state"] == "probing":
            output.line("it can be called as soon as a worker has probed it")
            return
        output.line(_aliases_line(answer))
        output.line(f'call it as model="{answer["base"]}:{answer["name"]}"')
        _print_remarks(output, answer, left)


def _aliases_line(answer: dict[str, Any]) -> str:
    aliases = answer.get("aliases", {})
    here = sorted(alias for alias, digest in aliases.items() if digest == answer["digest"])
    if here:
        return f"aliases: {', '.join(here)}"
    return (
        f"`default` still names another version; move it with "
        f"`loraplex adapter promote {answer['name']} {answer['version']}`"
    )


def _print_remarks(output: Output, answer: dict[str, Any], left: tuple[str, ...]) -> None:
    for kind in ("warnings", "notes"):
        for text in answer.get(kind, []):
            output.remark(f"{kind[:-1]}: {text}")
    skipped = [*left, *answer.get("skipped", [])]
    if skipped:
        output.remark(f"not needed, left out: {', '.join(skipped)}")


@app.command("ls")
def list_adapters(
    url: UrlFlag = DEFAULT_URL, api_key: AdminKeyFlag = None, json: JsonFlag = False
) -> None:
    """List all adapters."""
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        answer = client.request("GET", "/v1/adapters")
        if json:
            output.json(answer)
            return
        if not answer["data"]:
            output.line("no adapters yet; upload one with `loraplex adapter push NAME PATH`")
            return
        table = plain_table("NAME", "BASE", "DEFAULT", "VERSIONS", "ALIASES")
        for adapter in answer["data"]:
            aliases = adapter["aliases"]
            default = aliases.get("default", {}).get("version", "-")
            others = [
                f"{alias}={target['version']}"
                for alias, target in sorted(aliases.items())
                if alias != "default"
            ]
            versions = str(len(adapter["versions"]))
            table.add_row(
                adapter["name"], adapter["base"], default, versions, " ".join(others) or "-"
            )
        output.table(table)


@app.command("show")
def show(
    name: NameArgument,
    url: UrlFlag = DEFAULT_URL,
    api_key: AdminKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Show every version of one adapter."""
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        answer = client.request("GET", _path(name))
        if json:
            output.json(answer)
        else:
            _print_adapter(output, answer)


def _print_adapter(output: Output, adapter: dict[str, Any]) -> None:
    output.line(f"{adapter['name']}  base {adapter['base']}  generation {adapter['generation']}")
    table = plain_table(
        "VERSION", "ALIASES", "STATE", "RANK", "COVERAGE", "SIZE", "CREATED", "DIGEST"
    )
    for version in adapter["versions"]:
        table.add_row(
            version["version"],
            ", ".join(version.get("aliases", [])) or "-",
            version["state"],
            str(version["max_rank"] or "-"),
            version["coverage"] or "-",
            human_bytes(version["num_bytes"]) if version["num_bytes"] else "-",
            version["created"],
            version["digest"][:19],
        )
    output.table(table)
    for version in adapter["versions"]:
        if version.get("reason"):
            output.remark(f"{version['version']}: {version['state']}: {version['reason']}")
        for text in version.get("warnings", []):
            output.remark(f"{version['version']}: warning: {text}")


@app.command("promote")
def promote(
    name: NameArgument,
    version: Annotated[str, typer.Argument(help="v2, sha256:…, or another alias.")],
    alias: AliasFlag = "default",
    if_generation: Annotated[
        int | None,
        typer.Option("--if-generation", help="Refuse if the record has moved on since."),
    ] = None,
    url: UrlFlag = DEFAULT_URL,
    api_key: AdminKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Move an alias to a version, atomically; running requests keep the old one."""
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        params = {} if if_generation is None else {"if_generation": if_generation}
        path = f"{_path(name)}/aliases/{quote(alias, safe='')}"
        answer = client.request("PUT", path, json={"version": version}, params=params)
        _print_moved(output, answer, alias)


@app.command("rollback")
def rollback(
    name: NameArgument,
    alias: AliasFlag = "default",
    url: UrlFlag = DEFAULT_URL,
    api_key: AdminKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Swap an alias with the version that it named before."""
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        answer = client.request("POST", f"{_path(name)}/rollback", json={"alias": alias})
        _print_moved(output, answer, alias)


def _print_moved(output: Output, adapter: dict[str, Any], alias: str) -> None:
    if output.as_json:
        output.json(adapter)
        return
    target = adapter["aliases"][alias]
    output.line(
        f"{adapter['name']}: {alias} is now {target['version']} ({target['digest'][:19]}), "
        f"generation {adapter['generation']}"
    )


@app.command("rm")
def remove(
    name: NameArgument,
    url: UrlFlag = DEFAULT_URL,
    api_key: AdminKeyFlag = None,
    json: JsonFlag = False,
) -> None:
    """Retire an adapter with all its versions."""
    with reporting(as_json=json) as output, ApiClient(url=url, key=api_key) as client:
        answer = client.request("DELETE", _path(name))
        if json:
            output.json(answer)
        else:
            output.line(f"{name} is retired")


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"
