"""A POST of the admin side that is sent again with its key is done once and answered alike."""

import asyncio

import pytest
from redis.asyncio import Redis

from gateway.idempotency import Claim, IdempotencyKeys, RememberedAnswer
from gateway.routes.table import TABLE
from gateway.tenancy.keys import Access
from tests.gateway.peft_adapters import tiny_base
from tests.gateway.world import WEIGHTS, gateway_world

pytestmark = pytest.mark.anyio
KEY = {"idempotency-key": "push-42"}


async def push(world, folder, *, headers=KEY, **fields):
    """Upload as a client would each time: with a boundary of its own."""
    files = [("files", (name, (folder / name).read_bytes())) for name in WEIGHTS]
    return await world.http.post(
        "/v1/adapters", data={"name": "pirate"} | fields, files=files, headers=headers
    )


async def rollback(world, *, key="k", **options):
    headers = {"idempotency-key": key}
    return await world.http.post("/v1/adapters/pirate/rollback", headers=headers, **options)


async def default_of(world) -> str:
    return (await world.http.get("/v1/adapters/pirate")).json()["aliases"]["default"]["version"]


async def test_upload_that_is_sent_again_gets_the_same_answer(world, peft_adapters):
    first = await push(world, peft_adapters["pirate"])
    again = await push(world, peft_adapters["pirate"])
    without_key = await push(world, peft_adapters["pirate"], headers={})

    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert without_key.status_code == 200


async def test_change_that_is_sent_again_is_made_once(world, peft_adapters):
    await push(world, peft_adapters["pirate"], headers={})
    await push(world, peft_adapters["json"], headers={}, promote="true")

    first = await rollback(world)
    again = await rollback(world)

    assert again.content == first.content
    assert await default_of(world) == "v1"
    await rollback(world, key="another")
    assert await default_of(world) == "v2"


async def test_refusal_is_repeated_too(world, peft_adapters):
    refused = await rollback(world)
    await push(world, peft_adapters["pirate"], headers={})
    again = await rollback(world)

    assert refused.status_code == again.status_code == 404
    assert again.content == refused.content


@pytest.mark.parametrize("change", ["name", "file", "route", "query"])
async def test_key_that_came_with_another_request_is_refused(world, peft_adapters, change):
    await push(world, peft_adapters["pirate"])

    if change == "name":
        answer = await push(world, peft_adapters["pirate"], name="other")
    elif change == "file":
        answer = await push(world, peft_adapters["json"])
    elif change == "route":
        answer = await rollback(world, key=KEY["idempotency-key"])
    else:
        files = [("files", (n, (peft_adapters["pirate"] / n).read_bytes())) for n in WEIGHTS]
        answer = await world.http.post(
            "/v1/adapters", data={"name": "pirate"}, files=files, headers=KEY, params={"x": "1"}
        )

    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "idempotency_key_reused"
    assert "another request" in error["message"]
    names = [adapter["name"] for adapter in (await world.http.get("/v1/adapters")).json()["data"]]
    assert names == ["pirate"]


async def test_of_requests_at_the_same_time_one_is_done(world, peft_adapters):
    await push(world, peft_adapters["pirate"], headers={})
    await push(world, peft_adapters["json"], headers={}, promote="true")

    answers = await asyncio.gather(*(rollback(world) for _ in range(12)))

    done = [answer for answer in answers if answer.status_code == 200]
    busy = [answer for answer in answers if answer.status_code == 409]
    assert done
    assert len(done) + len(busy) == len(answers)
    assert len({answer.content for answer in done}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in done) == 1
    for answer in busy:
        assert answer.json()["error"]["code"] == "idempotency_key_in_use"
        assert answer.headers["x-should-retry"] == "true"
        assert answer.headers["retry-after"] == "1"
    assert await default_of(world) == "v1"


async def test_request_that_is_still_coming_in_holds_its_key(world):
    half_sent, may_end = asyncio.Event(), asyncio.Event()

    async def slowly():
        yield b'{"alias": '
        half_sent.set()
        await may_end.wait()
        yield b'"default"}'

    first = asyncio.create_task(rollback(world, content=slowly()))
    await half_sent.wait()
    meanwhile = await rollback(world, json={"alias": "default"})
    may_end.set()

    assert meanwhile.status_code == 409
    assert (await first).status_code == 404


async def test_key_of_a_client_that_left_is_free_again(world, peft_adapters):
    address = world.http.base_url
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(
        b"POST /v1/adapters HTTP/1.1\r\nhost: x\r\nidempotency-key: push-42\r\n"
        b"content-type: multipart/form-data; boundary=x\r\ncontent-length: 9999\r\n\r\n--x\r\n"
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    async with asyncio.timeout(10):
        while (answer := await push(world, peft_adapters["pirate"])).status_code == 409:
            pass

    assert answer.status_code == 201


async def test_what_the_gateway_failed_at_may_be_tried_again(
    valkey_url, redis_client, tmp_path, peft_adapters
):
    async with gateway_world(valkey_url, tmp_path / "store", num_workers=0) as world:
        await redis_client.hdel("{lp}:bases", "tiny")
        failed = await push(world, peft_adapters["pirate"])
        await world.registry.put_base(tiny_base())
        done = await push(world, peft_adapters["pirate"])

    assert failed.status_code == 503
    assert done.status_code in (201, 202)


async def test_too_large_a_repetition_is_given_up(
    valkey_url, redis_client, tmp_path, peft_adapters
):
    async with gateway_world(valkey_url, tmp_path / "s", max_upload_bytes=60_000) as world:
        await push(world, peft_adapters["pirate"])
        answer = await world.http.post("/v1/adapters", content=b"x" * 70_000, headers=KEY)

    assert answer.status_code == 413


@pytest.mark.parametrize("key", ["", "two words", "k" * 256, "snö"])
async def test_key_that_is_none_is_refused(world, key):
    answer = await rollback(world, key=key.encode())

    assert answer.status_code == 400
    assert "Idempotency-Key" in answer.json()["error"]["message"]


async def test_every_post_of_the_admin_side_is_repeated(world):
    posts = [spec for spec in TABLE if spec.method == "POST" and spec.access is Access.ADMIN]
    assert len(posts) >= 4
    for number, spec in enumerate(posts):
        url, headers = spec.path.replace("{name}", "none"), {"idempotency-key": f"key-{number}"}
        first, again = [
            await world.http.post(url, content=b'{"x": 1}', headers=headers) for _ in range(2)
        ]
        assert first.status_code == again.status_code
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true", spec.path


async def test_other_routes_don_t_know_the_key(world, peft_adapters):
    await push(world, peft_adapters["pirate"], headers={})
    body = {"model": "pirate", "prompt": "Hello"}

    for _ in range(2):
        answer = await world.http.post("/v1/completions", json=body, headers=KEY)
        assert answer.status_code == 200
        assert "idempotent-replayed" not in answer.headers


async def test_answer_is_kept_for_a_day_under_the_registry_s_tag(world, redis_client):
    await rollback(world)

    (name,) = [key async for key in redis_client.scan_iter("{lp}:idempotency:*")]
    assert 86_000 < await redis_client.ttl(name) <= 86_400


ANSWER = RememberedAnswer(fingerprint="f", status=201, headers=[("a", "b")], body=b"\x00{}")


async def test_claim_is_one_s_own_until_it_is_given_up(redis_client: Redis):
    keys = IdempotencyKeys(redis_client)
    claim = await keys.claim("a")
    assert isinstance(claim, Claim)
    assert await keys.claim("a") is None
    assert isinstance(await keys.claim("b"), Claim)

    await keys.forget("a", Claim(holder="somebody else"))
    assert await keys.claim("a") is None
    await keys.forget("a", claim)
    assert isinstance(await keys.claim("a"), Claim)


async def test_answer_takes_the_place_of_its_own_claim_only(redis_client: Redis):
    keys = IdempotencyKeys(redis_client)
    claim = await keys.claim("a")
    assert isinstance(claim, Claim)

    await keys.remember("a", Claim(holder="somebody else"), ANSWER)
    assert await keys.claim("a") is None
    await keys.remember("a", claim, ANSWER)
    assert await keys.claim("a") == ANSWER
    await keys.forget("a", claim)
    assert await keys.claim("a") == ANSWER


async def test_claim_of_a_gateway_that_died_ends_by_itself(redis_client: Redis):
    keys = IdempotencyKeys(redis_client, claim_ms=50)
    assert isinstance(await keys.claim("a"), Claim)

    async with asyncio.timeout(10):
        while await keys.claim("a") is None:
            pass


async def test_claim_that_is_held_doesn_t_end(redis_client: Redis):
    keys = IdempotencyKeys(redis_client, claim_ms=150)
    claim = await keys.claim("a")
    assert isinstance(claim, Claim)
    holding = asyncio.create_task(keys.hold("a", claim))
    for _ in range(30):
        assert await keys.claim("a") is None
        await asyncio.sleep(0.015)
    holding.cancel()
