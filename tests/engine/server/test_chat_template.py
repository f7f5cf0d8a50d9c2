"""Prompts equal those that transformers makes from the same template."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.errors import InvalidRequest
from engine.server.chat_template import ChatTemplate, find_template, special_tokens

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != "system" %}
        {{- "<|im_start|>system\\nYou are helpful.<|im_end|>\\n" }}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- set ns = namespace(seen=0) %}
{% for message in messages %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" }}
    {% generation %}{{ message["content"] | trim + "<|eot_id|>" }}{% endgeneration %}
    {{- message | tojson }}
{% endfor %}
{{- tools is none }} {{ documents is none }} {{ date_string }} {{ ns.seen }}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hello <b>&</b> grüß 好"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ],
]


@pytest.mark.parametrize("source", [LLAMA_2, CHATML, LLAMA_3], ids=["llama2", "chatml", "llama3"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "several"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_prompt_equals_that_of_transformers(source, messages, add_generation_prompt):
    rendered, _ = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **TOKENS,
    )
    template = ChatTemplate(source, TOKENS)
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == rendered[0]


def test_refusal_of_the_template_is_the_callers_error():
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        ChatTemplate(LLAMA_2, TOKENS).render([{"role": "assistant", "content": "me first"}])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{% set ns = namespace() %}{{ ns.__class__.__base__ }}",
        "{{ messages[7]['content'] + 1 }}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_nothing_leaves_the_sandbox(source):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, TOKENS).render([{"role": "user", "content": "x"}])


def test_template_beside_the_model_wins(tmp_path):
    named = {
        "chat_template": [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": "from the list"},
        ]
    }
    assert find_template(tmp_path, {"chat_template": "from the config"}) == "from the config"
    assert find_template(tmp_path, named) == "from the list"
    assert find_template(tmp_path, {}) is None
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert find_template(tmp_path, named) == "from the file"


def test_special_tokens_are_text_or_objects():
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
    }
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}
