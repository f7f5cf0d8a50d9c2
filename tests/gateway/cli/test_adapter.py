"""The adapter commands: what they send, what they print, how they end."""

import json
import re

import pytest

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
UPLOADED = {
    "name": "pirate",
    "base": "SmolLM2",
    "version": "v2",
    "digest": DIGEST,
    "lora_id": "pirate@abababababab",
    "state": "active",
    "generation": 3,
    "aliases": {"default": OTHER},
    "coverage": "60/210 modules",
    "max_rank": 8,
    "targets": ["q_proj"],
    "num_bytes": 1536,
    "warnings": ["trained on another base name"],
    "notes": [],
    "skipped": ["README.md"],
}
VERSION = {
    "version": "v1",
    "digest": OTHER,
    "lora_id": "pirate@cdcdcdcdcdcd",
    "state": "active",
    "created": "2026-01-01T00:00:00Z",
    "reason": "",
    "coverage": "60/210 modules",
    "max_rank": 8,
    "targets": ["q_proj"],
    "num_bytes": 1536,
    "warnings": [],
    "notes": [],
    "aliases": ["default"],
}
ADAPTER = {
    "name": "pirate",
    "base": "SmolLM2",
    "generation": 4,
    "aliases": {
        "default": {"version": "v1", "digest": OTHER},
        "canary": {"version": "v2", "digest": DIGEST},
    },
    "versions": [VERSION, {**VERSION, "version": "v2", "digest": DIGEST, "aliases": ["canary"]}],
}


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "pirate"
    (made / "checkpoint-5").mkdir(parents=True)
    (made / "adapter_config.json").write_text('{"r": 8}')
    (made / "adapter_model.safetensors").write_bytes(b"\0weights\xff")
    (made / "optimizer.pt").write_bytes(b"gigabytes")
    return made


def parts_of(asked) -> dict[str, list[bytes]]:
    """The multipart body's values by field, file names in front of their bytes."""
    boundary = asked.headers["content-type"].partition("boundary=")[2].encode()
    found: dict[str, list[bytes]] = {}
    for part in asked.body.split(b"--" + boundary)[1:-1]:
        head, _, value = part.strip(b"\r\n").partition(b"\r\n\r\n")
        names = dict(re.findall(rb'(\w+)="([^"]*)"', head))
        value = names.get(b"filename", b"") + b"|" + value if b"filename" in names else value
        found.setdefault(names[b"name"].decode(), []).append(value)
    return found


def test_push_sends_what_is_needed_of_a_directory(cli, server, directory):
    server.answer("POST /v1/adapters", UPLOADED, status=201)

    done = cli("adapter", "push", "pirate", str(directory), "--promote", "--base", "SmolLM2")

    assert done.exit_code == 0
    assert parts_of(server.asked[0]) == {
        "name": [b"pirate"],
        "base": [b"SmolLM2"],
        "promote": [b"true"],
        "files": [
            b'adapter_config.json|{"r": 8}',
            b"adapter_model.safetensors|\0weights\xff",
        ],
    }
    assert "pirate@v2 is active: 60/210 modules, rank 8, 1.5 KiB" in done.stdout
    assert "loraplex adapter promote pirate v2" in done.stdout
    assert 'model="SmolLM2:pirate"' in done.stdout
    assert "warning: trained on another base name" in done.stderr
    assert "left out: checkpoint-5, optimizer.pt, README.md" in done.stderr


def test_push_of_a_directory_without_weights_lets_the_server_say_why(cli, server, tmp_path):
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    problems = ["adapter_config.json is missing", "adapter_model.bin is a pickle"]
    error = {"message": "; ".join(problems), "code": "invalid_adapter", "problems": problems}
    server.answer("POST /v1/adapters", {"error": error}, status=422)

    done = cli("adapter", "push", "pirate", str(tmp_path))

    assert done.exit_code == 1
    assert parts_of(server.asked[0])["files"] == [b"adapter_model.bin|pickle"]
    assert "2 problems:\n  - adapter_config.json is missing\n  - adapter_model.bin" in done.stderr


def test_push_sends_an_archive_as_it_is(cli, server, tmp_path):
    archive = tmp_path / "pirate.tar.gz"
    archive.write_bytes(b"\x1f\x8b...")
    server.answer("POST /v1/adapters", UPLOADED, status=201)

    done = cli("adapter", "push", "pirate", str(archive), "--json")

    assert done.exit_code == 0
    assert json.loads(done.stdout) == {**UPLOADED, "not_sent": []}
    assert parts_of(server.asked[0]) == {
        "name": [b"pirate"],
        "files": [b"pirate.tar.gz|\x1f\x8b..."],
    }


def test_push_of_a_path_that_is_not_there_is_a_usage_error(cli, server, tmp_path):
    done = cli("adapter", "push", "pirate", str(tmp_path / "nothing"))

    assert done.exit_code == 2
    assert "there's nothing at" in done.stderr
    assert server.asked == []


def test_push_of_a_directory_beside_files_is_a_usage_error(cli, directory):
    done = cli("adapter", "push", "pirate", str(directory), str(directory / "optimizer.pt"))

    assert done.exit_code == 2
    assert "give one directory, or files" in done.stderr


def test_ls_shows_each_adapter_with_its_default_and_aliases(cli, server):
    server.answer("GET /v1/adapters", {"object": "list", "data": [ADAPTER]})

    done = cli("adapter", "ls")

    assert done.exit_code == 0
    header, row = done.stdout.splitlines()
    assert header.split() == ["NAME", "BASE", "DEFAULT", "VERSIONS", "ALIASES"]
    assert row.split() == ["pirate", "SmolLM2", "v1", "2", "canary=v2"]


def test_ls_of_nothing_says_how_to_begin(cli, server):
    server.answer("GET /v1/adapters", {"object": "list", "data": []})

    assert "loraplex adapter push" in cli("adapter", "ls").stdout


def test_show_lists_every_version_even_without_a_manifest(cli, server):
    bare = {"coverage": None, "max_rank": None, "num_bytes": None}
    lost = {**VERSION, **bare, "version": "v3", "state": "failed", "reason": "no effect"}
    server.answer("GET /v1/adapters/a%2Fb", {**ADAPTER, "versions": [VERSION, lost]})

    done = cli("adapter", "show", "a/b")

    assert done.exit_code == 0
    assert "generation 4" in done.stdout
    assert "1.5 KiB" in done.stdout
    assert "v3: failed: no effect" in done.stderr


def test_promote_moves_an_alias_guarded_by_the_generation(cli, server):
    server.answer("PUT /v1/adapters/pirate/aliases/canary", ADAPTER)

    done = cli("adapter", "promote", "pirate", "v2", "--alias", "canary", "--if-generation", "3")

    assert done.exit_code == 0
    assert server.asked[0].path.endswith("?if_generation=3")
    assert server.asked[0].json == {"version": "v2"}
    assert "pirate: canary is now v2" in done.stdout


def test_rollback_names_the_alias(cli, server):
    server.answer("POST /v1/adapters/pirate/rollback", ADAPTER)

    done = cli("adapter", "rollback", "pirate", "--json")

    assert server.asked[0].json == {"alias": "default"}
    assert json.loads(done.stdout) == ADAPTER


def test_rm_retires_the_name(cli, server):
    server.answer("DELETE /v1/adapters/pirate", {"name": "pirate", "deleted": True})

    assert "pirate is retired" in cli("adapter", "rm", "pirate").stdout


def test_conflict_is_told_in_the_servers_words(cli, server):
    error = {"message": "generation is 5, not 3", "code": "conflict", "type": "x", "param": None}
    server.answer("POST /v1/adapters/pirate/rollback", {"error": error}, status=409)

    plain = cli("adapter", "rollback", "pirate")
    as_json = cli("adapter", "rollback", "pirate", "--json")

    assert (plain.exit_code, as_json.exit_code) == (1, 1)
    assert "error: generation is 5, not 3" in plain.stderr
    assert json.loads(as_json.stdout) == {"error": error}


def test_admin_key_comes_first_and_is_sent_as_bearer(cli, server):
    server.answer("GET /v1/adapters", {"object": "list", "data": []})
    keys = {"LORAPLEX_API_KEY": "data", "LORAPLEX_ADMIN_KEY": "admin"}

    cli("adapter", "ls", env=keys)
    cli("adapter", "ls", "--api-key", "mine", env=keys)
    cli("adapter", "ls")

    sent = [asked.headers.get("authorization") for asked in server.asked]
    assert sent == ["Bearer admin", "Bearer mine", None]


def test_refused_key_says_where_a_key_goes(cli, server):
    server.answer("GET /v1/adapters", {"error": {"message": "send your key"}}, status=401)

    done = cli("adapter", "ls")

    assert done.exit_code == 1
    assert "LORAPLEX_ADMIN_KEY" in done.stderr
