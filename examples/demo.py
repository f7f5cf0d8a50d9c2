"""The main job from end to end, on one machine, checked line by line; `make demo` runs it.

Starts `loraplex serve` with an empty state folder, pushes three adapters, streams from all of
them and the base at once, swaps one of them for a better version while it talks, and takes the
swap back. Exit code 0 means that every line below is true.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
from demo_client import Admin, Answer, stream
from demo_report import Checks, answers_table
from demo_server import LORAPLEX, DemoServer, ServerDidNotStart
from openai import AsyncOpenAI
from predicates import PREDICATES, pirate_version

from gateway.embedded.default_model import SERVED_NAME, find_default_model

HERE = Path(__file__).resolve().parent
ADAPTERS = ("json", "pirate", "brief")
NUM_REQUESTS = 24
LONG_ANSWER_TOKENS = 160
PROMPTS: list[str] = json.loads((HERE / "data" / "held_out_prompts.json").read_text())[:6]


async def push_adapters(admin: Admin, url: str, checks: Checks) -> dict[str, dict[str, Any]]:
    """Push two adapters by REST and one by the command line; return each one's record."""
    pushed = {name: await admin.push(name, HERE / "adapters" / name) for name in ADAPTERS[:2]}
    command = [str(LORAPLEX), "adapter", "push", "brief", str(HERE / "adapters" / "brief")]
    process = await asyncio.create_subprocess_exec(
        *command, "--url", url, "--json", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    checks.expect("`loraplex adapter push` exits 0", process.returncode == 0)
    pushed["brief"] = checks.json_of(output)
    for name, record in pushed.items():
        checks.expect(
            f"{name} is active as v1",
            record.get("state") == "active" and record.get("version") == "v1",
            f"rank {record.get('max_rank')}, {record.get('coverage')}",
        )
    return pushed


async def mixed_batch(
    client: AsyncOpenAI, admin: Admin, pushed: dict[str, dict[str, Any]], checks: Checks
) -> None:
    """Stream 24 answers at once: six prompts, each to the base and to three adapters."""
    before = await admin.step_statistics()
    models = [SERVED_NAME, *(f"{SERVED_NAME}:{name}" for name in ADAPTERS)]
    answers = [
        Answer(model=models[index % len(models)], prompt=PROMPTS[index // len(models)])
        for index in range(NUM_REQUESTS)
    ]
    await asyncio.gather(*(stream(client, answer) for answer in answers))
    after = await admin.step_statistics()
    checks.show(answers_table(answers, {record["digest"]: "v1" for record in pushed.values()}))

    checks.expect(f"{NUM_REQUESTS} streams finished", all(a.finish_reason for a in answers))
    checks.expect("each answer names the model it was asked of", _all_echoed(answers))
    versions = {record["name"]: record["digest"] for record in pushed.values()}
    for name in ADAPTERS:
        own = [answer for answer in answers if answer.model.endswith(f":{name}")]
        holds = sum(PREDICATES[name](answer.text) for answer in own)
        checks.expect(
            f"{name} answers in its style", holds >= 0.8 * len(own), f"{holds} of {len(own)}"
        )
        checks.expect(f"{name} ran as v1", all(answer.version == versions[name] for answer in own))
    base = [answer for answer in answers if answer.model == SERVED_NAME]
    plain = sum(not any(holds(answer.text) for holds in PREDICATES.values()) for answer in base)
    checks.expect(
        "the base has none of the styles", plain >= 0.8 * len(base), f"{plain} of {len(base)}"
    )
    checks.expect("the base ran as itself", all(answer.version == "base" for answer in base))
    _check_steps(before, after, checks)


def _all_echoed(answers: list[Answer]) -> bool:
    return all(answer.echoed_model == answer.model for answer in answers)


def _check_steps(before: dict[str, int], after: dict[str, int], checks: Checks) -> None:
    steps = {name: after[name] - before[name] for name in before}
    mixed = steps["num_steps_with_several_adapters"]
    most = after["max_adapters_in_step"]
    checks.expect(
        "steps computed several adapters at once",
        mixed > 0 and most >= len(ADAPTERS),
        f"{mixed} of {steps['num_steps']} steps; up to {most} adapters in one",
    )


async def swap_while_streaming(
    client: AsyncOpenAI, admin: Admin, v1: dict[str, Any], checks: Checks
) -> None:
    """Promote pirate v2 under running streams, then roll back."""
    v2 = await admin.push("pirate", HERE / "adapter_updates" / "pirate")
    checks.expect("pirate v2 is active", (v2["version"], v2["state"]) == ("v2", "active"))
    checks.expect("default is still v1", v2["aliases"]["default"] == v1["digest"])

    model = f"{SERVED_NAME}:pirate"
    running = [Answer(model=model, prompt=prompt) for prompt in PROMPTS[:3]]
    tasks = [
        asyncio.create_task(stream(client, one, max_tokens=LONG_ANSWER_TOKENS, ignore_eos=True))
        for one in running
    ]
    await _all_begun(running, tasks)
    await admin.promote("pirate", "v2")
    still_running = sum(not task.done() for task in tasks)
    fresh = await stream(client, Answer(model=model, prompt=PROMPTS[0]))
    await asyncio.gather(*tasks)
    checks.show(answers_table([*running, fresh], {v1["digest"]: "v1", v2["digest"]: "v2"}))
    checks.expect(
        "v2 was promoted while streams ran",
        still_running == len(tasks),
        f"{still_running} of {len(tasks)} still running",
    )
    checks.expect(
        "running streams stayed on v1 to their end",
        all(_is_pirate(one, 1, v1) and one.num_tokens == LONG_ANSWER_TOKENS for one in running),
    )
    checks.expect("the next request is v2", _is_pirate(fresh, 2, v2), fresh.text)

    rolled_back = await admin.rollback("pirate")
    checks.expect(
        "rollback points default at v1", rolled_back["aliases"]["default"]["version"] == "v1"
    )
    again = await stream(client, Answer(model=model, prompt=PROMPTS[0]))
    checks.expect("the request after it is v1", _is_pirate(again, 1, v1), again.text)
    by_number = await stream(client, Answer(model=f"{model}@v2", prompt=PROMPTS[0]))
    checks.expect("v2 still answers by its number", _is_pirate(by_number, 2, v2), by_number.text)


async def _all_begun(answers: list[Answer], tasks: list[asyncio.Task[Answer]]) -> None:
    """Return when every stream has text, or when one has failed."""
    begun = asyncio.gather(*(answer.begun.wait() for answer in answers))
    await asyncio.wait({begun, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()


def _is_pirate(answer: Answer, version: int, record: dict[str, Any]) -> bool:
    return answer.version == record["digest"] and pirate_version(answer.text) == version


async def ask_for_unknown(client: AsyncOpenAI, checks: Checks) -> None:
    """Ask for an adapter that isn't there: an error, never the base's answer."""
    try:
        await stream(client, Answer(model=f"{SERVED_NAME}:pirat", prompt=PROMPTS[0]))
    except openai.NotFoundError as error:
        checks.expect(
            "an unknown adapter is 404 model_not_found",
            error.code == "model_not_found",
            str(error.body["message"]) if isinstance(error.body, dict) else "",
        )
    else:
        checks.expect("an unknown adapter is 404 model_not_found", False, "it was answered")


async def main_job(server: DemoServer, checks: Checks) -> None:
    """Run every part of the demo against a server that is up."""
    admin = Admin(server.url)
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    try:
        checks.title("Push three adapters")
        pushed = await push_adapters(admin, server.url, checks)
        checks.title(f"{NUM_REQUESTS} streams at once, base and adapters mixed")
        await mixed_batch(client, admin, pushed, checks)
        checks.title("Swap an adapter while it talks, and roll back")
        await swap_while_streaming(client, admin, pushed["pirate"], checks)
        checks.title("What isn't there")
        await ask_for_unknown(client, checks)
    finally:
        await client.close()
        await admin.close()


async def main() -> int:
    """Start the server, run the demo, end the server; 0 when every check holds."""
    checks = Checks()
    server = DemoServer(find_default_model(), SERVED_NAME)
    try:
        checks.title("Start")
        await server.start()
        checks.expect("loraplex serves", True, server.url)
        await main_job(server, checks)
        checks.title("Stop")
        code = await server.stop()
        checks.expect("the server drained and exited 0", code == 0, f"exit code {code}")
        left = server.living_pids()
        checks.expect("no process is left", not left, ", ".join(map(str, left)))
    except ServerDidNotStart as error:
        checks.expect("loraplex serves", False, str(error))
    except openai.APIError as error:
        checks.expect("every request is answered", False, f"{type(error).__name__}: {error}")
    finally:
        await server.close()
    return checks.summary()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
