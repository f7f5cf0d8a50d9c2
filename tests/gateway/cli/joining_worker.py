"""Stands in for engine.server in tests of `serve`: joins the registry, runs no model.

SCRIPTED_BEHAVIOUR in the environment: join, refuse (say `failed`), load (never become ready),
stubborn (join, and ignore SIGTERM).
"""

import asyncio
import json
import os
import signal
import sys
import threading

import redis.asyncio

from adapters.base_description import BaseDescription, LinearShape
from adapters.heartbeat import WorkerHeartbeat, sign
from adapters.registry import AdapterRegistry

BASE = BaseDescription(
    base_id="SmolLM2-135M-Instruct",
    identity="sha256:" + "0" * 64,
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden=576,
    vocab_size=49152,
    max_model_len=8192,
    tie_word_embeddings=True,
    modules={
        "q_proj": LinearShape(576, 576),
        "k_proj": LinearShape(576, 192),
        "v_proj": LinearShape(576, 192),
        "o_proj": LinearShape(576, 576),
        "gate_proj": LinearShape(576, 1536),
        "up_proj": LinearShape(576, 1536),
        "down_proj": LinearShape(1536, 576),
    },
)


def say(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def end_with_parent():
    sys.stdin.read()
    os._exit(0)


async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
    """Answer one request, whatever it is, as a probe that has found an effect."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (
            line.split(b":")[1]
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ),
        b"0",
    )
    await reader.readexactly(int(length))
    body = b'{"has_effect": true, "is_finite": true, "logit_gap": 1.0, "noise": 0.0}'
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    writer.write(body)
    await writer.drain()
    writer.close()


async def join(config, stop: asyncio.Event):
    server = await asyncio.start_server(agree, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    unsigned = WorkerHeartbeat(
        worker_id=config["worker_id"],
        address=address,
        base_id=BASE.base_id,
        base_identity=BASE.identity,
        instance=f"pid-{os.getpid()}",
        num_free_blocks=100,
        num_blocks=100,
    )
    beat = sign(unsigned, os.environ.get("LORAPLEX_CLUSTER_TOKEN"))
    async with redis.asyncio.Redis.from_url(os.environ["LORAPLEX_REDIS_URL"]) as client:
        registry = AdapterRegistry(client)
        await registry.put_base(BASE)
        await registry.put_heartbeat(beat)
        memory = {"kv_bytes": 3 << 30, "lora_bytes": 1 << 30}
        say(event="ready", address=address, base_id=BASE.base_id, memory=memory, num_blocks=100)
        while not stop.is_set():
            await registry.put_heartbeat(beat)
            try:
                await asyncio.wait_for(stop.wait(), 1)
            except TimeoutError:
                continue


async def main(behaviour: str):
    config = json.loads(sys.argv[sys.argv.index("--config") + 1])
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set if behaviour != "stubborn" else print)
    threading.Thread(target=end_with_parent, daemon=True).start()
    say(event="progress", text="loading the model")
    if behaviour == "load":
        await stop.wait()
    elif behaviour == "refuse":
        say(event="failed", message="GPTQ checkpoints aren't served", code="unsupported_model")
    else:
        await join(config, stop)


if __name__ == "__main__":
    asyncio.run(main(os.environ.get("SCRIPTED_BEHAVIOUR", "join")))
