"""The official client understands the worker."""

import openai
import pytest

from tests.engine.server.conftest import RunningWorker
from tests.engine.server.echo_core import Mishap

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hello there"}]


async def test_official_client_is_served(running: RunningWorker):
    async with openai.AsyncOpenAI(base_url=running.address + "/v1", api_key="-") as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        text = whole.choices[0].message.content
        assert text == "user\nhello there\nassistant\n"
        assert whole.choices[0].logprobs.content[0].bytes
        assert whole.usage.prompt_tokens_details.cached_tokens == 3
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == text
        assert chunks[-1].usage == whole.usage
        completion = await client.completions.create(model="tiny", prompt=["a b", "c"], logprobs=1)
        assert [choice.text for choice in completion.choices] == ["a b", "c"]
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_official_client_raises_our_errors(running: RunningWorker):
    async with openai.AsyncOpenAI(base_url=running.address + "/v1", api_key="-") as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nobody", messages=MESSAGES)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[])
        assert bad.value.param == "tools"
        stream = await client.completions.create(
            model="tiny", prompt="a b c d e", stream=True, seed=Mishap.ERROR_AFTER_TWO_TOKENS
        )
        with pytest.raises(openai.APIError, match="the step failed"):
            _ = [chunk async for chunk in stream]
