"""Chat templates: what they may use, what they are given, and what they must not reach."""

import re
import time

import pytest

from octavo.base.errors import RequestError
from octavo.frontend.text import chat_template
from octavo.frontend.text.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)


def render(source, messages=USER, **options):
    return ChatTemplate(source).render(messages, **options)


def test_generation_prompt():
    assert render(CHATML) == "<user>Hi</><assistant>"
    assert render(CHATML, add_generation_prompt=False) == "<user>Hi</>"


def test_equals_transformers_on_a_template_of_the_wild():
    from transformers.utils.chat_template_utils import render_jinja_template

    source = """
{%- macro show(tool) %}{{ tool | tojson(indent=2) }}{% endmacro -%}
{{ bos_token }}{% set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {{- '<' ~ message['role'] ~ '>' + message['content'][:40] | upper + '\\n' }}
    {% generation %}{{ message.name | default('?') }}{% endgeneration %}
{%- endfor %}
{% for tool in tools or [] %}{{ show(tool) }}{% endfor %}
{{ ns.n }} {{ documents }} {{ enable_thinking }} {{ messages | length }} {{ messages[-1].keys() | list }}
"""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "<é&'\">", "name": "Bo"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"ü": [1, None, True]}}}]
    documents = [{"title": "t", "text": "x"}]
    (expected,), _ = render_jinja_template(
        [messages],
        tools=tools,
        documents=documents,
        chat_template=source,
        bos_token="<s>",
        enable_thinking=False,
        add_generation_prompt=True,
    )
    assert expected == render(
        source,
        messages,
        tools=tools,
        documents=documents,
        special_tokens={"bos_token": "<s>"},
        chat_template_kwargs={"enable_thinking": False},
    )


def test_strftime_now_and_break():
    assert re.fullmatch(r"20\d\d", render("{{ strftime_now('%Y') }}"))
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "string"),
        (PARTS, "openai"),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}p{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% for p in m.content | list %}x{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_content_format_is_found(source, expected):
    assert ChatTemplate(source).traits.content_format == expected


def test_parts_of_content():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(CHATML, parts) == "<user>a\nb</><assistant>"
    assert render(PARTS, parts) == "[a][b]"
    assert render(PARTS, USER) == "[Hi]"
    assert render(PARTS, parts, content_format="string") == "a\nb"
    with pytest.raises(RequestError, match="content_format='list' is not one of auto, string, openai"):
        render(PARTS, parts, content_format="list")
    assert parts[0]["content"][0] == {"type": "text", "text": "a"}


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
def test_thoughts_of_earlier_turns_have_two_names(given, read):
    turn = {"role": "assistant", "content": "Yes.", given: "Hm."}
    assert render("{{ messages[0]." + read + " }}", [turn]) == "Hm."


def test_continue_final_message():
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(CHATML, messages, **options) == "<user>Hi</><assistant>Well,"
    untrimmed = CHATML.replace(" | trim", "")
    assert render(untrimmed, messages, **options) == "<user>Hi</><assistant>Well, "
    as_parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    assert render(PARTS, as_parts, **options) == "[Hi][Well"
    assert messages[1]["content"] == "Well, "


@pytest.mark.parametrize(
    ("source", "messages", "options", "text"),
    [
        (CHATML, USER, {"continue_final_message": True}, "exclude each other"),
        ("x", USER, {"continue_final_message": True, "add_generation_prompt": False}, "does not print"),
        (
            CHATML,
            [],
            {"continue_final_message": True, "add_generation_prompt": False},
            "needs a last message",
        ),
        (CHATML, USER, {"chat_template_kwargs": {"messages": []}}, "may not set messages"),
        (CHATML, USER, {"chat_template_kwargs": {"x": object()}}, "plain data"),
        (CHATML, [{"content": "no role"}], {}, "'role'"),
        (CHATML, ["Hi"], {}, "'role'"),
        (CHATML, [{"role": "user", "content": 3}], {}, "string or a list"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "image_url"),
        ("{{ raise_exception('roles must alternate') }}", USER, {}, "roles must alternate"),
        ("{% for %}", USER, {}, "not valid Jinja"),
        ("{{ messages[0].a.b }}", USER, {}, "refused"),
        ("{{ messages[0].content + 1 }}", USER, {}, "TypeError"),
        ("{{ 1 / 0 }}", USER, {}, "ZeroDivisionError"),
    ],
)
def test_errors_are_the_requests(source, messages, options, text):
    with pytest.raises(RequestError, match=text):
        render(source, messages, **options)


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ (messages | attr('append'))(1) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' * 100000000 }}",
        "{{ 3 * [[0] * 10000000] }}",
        "{% for i in range(1000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    try:
        text = render(source)
    except RequestError:
        return
    assert text == ""  # what must not be reached counts as undefined, which prints as nothing


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    with pytest.raises(RequestError, match="more than 1000"):
        render("{% for i in range(500) %}{{ messages[0].content }}!{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set n = range(99999) | sum %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro f(n) %}{% if n %}{% call g() %}{{ f(n - 1) }}{% endcall %}{% endif %}{% endmacro %}"
        "{{ f(40) }}",
    ],
)
def test_time_is_bounded(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    begun_s = time.monotonic()
    with pytest.raises(RequestError, match="did not come to its end"):
        render(source)
    assert time.monotonic() - begun_s < 2.0
    assert render(CHATML) == "<user>Hi</><assistant>"
