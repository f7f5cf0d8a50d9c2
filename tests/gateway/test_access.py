"""Who may call what: every route and method, denied by default."""

import pytest
from starlette.routing import Route

from gateway.app import create_app
from gateway.errors import Forbidden, Unauthorized
from gateway.routes.table import TABLE
from gateway.settings import GatewaySettings
from gateway.tenancy.keys import Access, KeyRing
from tests.gateway.world import gateway_world

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
PUBLIC = {("GET", "/health"), ("GET", "/docs"), ("GET", "/openapi.json")}
DATA = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/v1/models"),
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def concrete(path: str) -> str:
    return path.replace("{name}", "pirate").replace("{alias}", "prod")


def test_table_says_who_may_call_what():
    assert {(s.method, s.path) for s in TABLE if s.access is Access.PUBLIC} == PUBLIC
    assert {(s.method, s.path) for s in TABLE if s.access is Access.DATA} == DATA


def test_app_has_the_routes_of_the_table_and_no_others(tmp_path):
    app = create_app(GatewaySettings(redis_url="unix:///nowhere", store_dir=tmp_path))

    assert all(isinstance(route, Route) for route in app.routes)
    routes = {(m, r.path) for r in app.routes for m in r.methods if m != "HEAD"}
    assert routes == {(spec.method, spec.path) for spec in TABLE}


@pytest.mark.anyio
async def test_every_route_and_method_is_shut_without_its_key(valkey_url, redis_client, tmp_path):
    async with gateway_world(
        valkey_url, tmp_path, api_key="data-key", admin_key="admin-key"
    ) as world:
        paths = {concrete(spec.path) for spec in TABLE} | {"/", "/v1", "/internal/status"}
        public = {(m, p) for method, p in PUBLIC for m in (method, "HEAD")}
        for path in sorted(paths):
            for method in METHODS:
                bare = await world.http.request(method, path)
                wrong = await world.http.request(method, path, headers=bearer("guess"))
                if (method, path) in public:
                    assert bare.status_code == 200, (method, path)
                    continue
                assert (bare.status_code, wrong.status_code) == (401, 401), (method, path)
                is_admin = any(
                    s.access is Access.ADMIN
                    and concrete(s.path) == path
                    and (s.method == method or (s.method, method) == ("GET", "HEAD"))
                    for s in TABLE
                )
                known = await world.http.request(method, path, headers=bearer("data-key"))
                assert (known.status_code == 403) == is_admin, (method, path, known.status_code)
                admin = await world.http.request(method, path, headers=bearer("admin-key"))
                assert admin.status_code not in {401, 403}, (method, path)


@pytest.mark.anyio
async def test_unknown_path_and_method_have_openai_s_shape(world):
    missing = await world.http.get("/v1/nope")
    wrong = await world.http.get("/v1/completions")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_without_keys_everything_is_open():
    ring = KeyRing(api_key=None, admin_key=None)

    ring.check(None, Access.ADMIN)


def test_admin_key_opens_data_and_data_key_does_not_open_admin():
    ring = KeyRing(api_key="d", admin_key="a")

    ring.check("Bearer a", Access.DATA)
    ring.check("bearer d", Access.DATA)
    with pytest.raises(Forbidden):
        ring.check("Bearer d", Access.ADMIN)


def test_one_key_shuts_what_the_missing_one_would_open():
    with pytest.raises(Forbidden):
        KeyRing(api_key="d", admin_key=None).check("Bearer d", Access.ADMIN)
    with pytest.raises(Unauthorized):
        KeyRing(api_key=None, admin_key="a").check(None, Access.DATA)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic d", "d", "Bearer dd"])
def test_what_is_not_the_key_is_unauthorized(header):
    with pytest.raises(Unauthorized):
        KeyRing(api_key="d", admin_key=None).check(header, Access.DATA)
