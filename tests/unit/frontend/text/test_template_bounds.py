"""Hostile chat templates end in an error, soon and without taking memory; harmless ones are let through."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from octavo.base.errors import RequestError
from octavo.frontend.text import chat_template, template_process
from octavo.frontend.text.chat_template import ChatTemplate
from tests.known_templates import TEMPLATES

USER = [{"role": "user", "content": "Hi"}]
DOUBLE = "{% set ns = namespace(s='xxxxxxxxxxxxxxxx', l=[1, 2], n=2) %}{% for i in range(64) %}"
NESTED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
BOMBS = {
    "~": DOUBLE + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "+": DOUBLE + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "*": DOUBLE + "{% set ns.s = ns.s * 9 %}{% endfor %}",
    "lists": DOUBLE + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "integers": DOUBLE + "{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "replace": DOUBLE + "{% set ns.s = ns.s | replace('x', ns.s) %}{% endfor %}",
    "replace method": DOUBLE + "{% set ns.s = ns.s.replace('x', ns.s) %}{% endfor %}",
    "translate": DOUBLE + "{% set ns.s = ns.s.translate({120: ns.s}) %}{% endfor %}",
    "join": DOUBLE + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "join method": DOUBLE + "{% set ns.s = ns.s.join([ns.s] * 9) %}{% endfor %}",
    "join of an iterator": DOUBLE + "{% set ns.s = [ns.s] * 9 | map('upper') | join %}{% endfor %}",
    "nested lists": DOUBLE + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "nested lists as JSON": DOUBLE + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "nested lists as text": DOUBLE + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{% set x = ns.l | string %}",
    "captured": DOUBLE + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "captured words": "{% set s %}{% for i in range(99999) %}" + 9999 * "word " + "{% endfor %}{% endset %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}"
    + 99999 * "x"
    + "{% endif %}{% endmacro %}{% set s = f(50) %}",
    "center": "{% set s = 'x' | center(9999999999) %}",
    "constant": "{{ 'x' | center(9999999999) }}",
    "ljust": "{% set s = 'x'.ljust(9999999999) %}",
    "zfill": "{% set s = '1'.zfill(9999999999) %}",
    "expandtabs": "{% set s = '\\t'.expandtabs(2000000000) %}",
    "indent": "{% set s = ('x\\n' * 9999) | indent(9999999) %}",
    "tojson": "{% set s = [[1]] | tojson(indent=999999999) %}",
    "batch": "{% set s = [1] | batch(9999999999, 0) | list %}",
    "slice": "{% set s = [1] | slice(9999999999) | list %}",
    "round": "{% set s = 1.5 | round(9999999999, 'ceil') %}",
    "format": "{% set s = '%9999999999d' | format(1) %}",
    "%": "{% set s = '%9999999999d' % 1 %}",
    "% with a width": "{% set s = '%*d' % (999999999, 1) %}",
    "format method": "{% set s = '{:9999999999}'.format(1) %}",
    "format method with a width": "{% set s = '{:{}}'.format(1, 999999999) %}",
    "lipsum": "{% set s = lipsum(99999999) %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested lists compared": NESTED + "{{ ns.x == ns.y }}",
    "nested list looked for": NESTED + "{{ ns.x in [ns.y] }}",
    "nested lists sorted": NESTED + "{{ [ns.x, ns.y] | sort }}",
    "long list sorted": "{{ (range(99999) | list * 100) | sort }}",
    "long list grouped": "{% set x = (range(99999) | list * 100) | groupby(0) %}",
    "recursive loop": "{% for i in [[1]] recursive %}{{ loop([[1], [1]]) }}{% endfor %}",
    "deep expression": "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
    "many conditions": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
}


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """A gigabyte more than there is now: what escapes the bounds fails."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), limits[1]))
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 1.0)
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def harmless():
    """A template whose process lives on beside those of bombs."""
    return ChatTemplate("{{ messages[0].content }}")


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name, harmless, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.3)
    begun_s = time.monotonic()
    with pytest.raises(RequestError) as caught:
        ChatTemplate(BOMBS[name]).render(USER)
    assert time.monotonic() - begun_s < 8.0
    assert "MemoryError" not in str(caught.value)
    assert harmless.render(USER) == "Hi"


def test_the_bounds_are_those_of_one_rendering():
    template = ChatTemplate("{% for i in range(999) %}{% set s = messages[0].content ~ '!' %}{% endfor %}.")
    messages = [{"role": "user", "content": "x" * 100_000}]
    assert [template.render(messages) for _ in range(4)] == ["."] * 4


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ [1, 'b'] ~ missing }}", "a1None[1, 'b']"),
        ("{{ 'a' ~ (1 ~ 2) ~ (3 + 4) }}", "a127"),
        ("{{ '%-5s|%3.1f' % ('a', 1.25) }}", "a    |1.2"),
        ("{{ '{:>4}|{{}}'.format('a') }}", "   a|{}"),
        ("{{ 'a,b'.split(',') | join('-') }}{{ '-'.join(['a', 'b']) }}", "a-ba-b"),
        ("{{ [3, 4] | map('string') | join }}", "34"),
        ("{{ 'ab' * 3 }}{{ 3 * 4 }}{{ [1] * 2 }}{{ 2.5 * 2 }}", "ababab12[1, 1]5.0"),
        ("{{ [1] + [2] }}{{ 'a' + 'b' }}{{ 1 + 2 }}{{ 7 % 4 }}", "[1, 2]ab33"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ 'x' | center(5) }}{{ 'x'.ljust(3) }}|", "  x  x  |"),
        ("{{ 2.345 | round(2) }} {{ 7 | round }}", "2.35 7"),
        (
            "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}",
            "[[1, 2], [3, 0]][[1, 2], [3]]",
        ),
        ("{{ {'a': 1} | xmlattr }}{{ 'a b' | urlencode }}", ' a="1"a%20b'),
    ],
)
def test_what_can_grow_still_works(source, text):
    import jinja2

    assert ChatTemplate(source).render(USER) == text
    assert jinja2.Environment().from_string(source).render() == text


def test_a_long_conversation_is_no_bomb():
    """A template of the kind that grows a text message by message, and 200 long messages."""
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text + '<' ~ m.role ~ '>' ~ (m.content | trim | replace('\\r', '')) %}"
        "{% endfor %}{{ ns.text }}"
    )
    messages = [{"role": "user", "content": "word " * 1000}] * 200
    assert len(ChatTemplate(source).render(messages)) == 200 * (6 + 4999)


def test_templates_that_were_read_need_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    for source in TEMPLATES.values():
        assert "Hi" in ChatTemplate(source).render(USER, special_tokens={"bos_token": "", "eos_token": ""})
    with pytest.raises(TypeError):
        ChatTemplate(TEMPLATES["ChatML"] + " ").render(USER)


def test_the_process_comes_once_and_goes_with_its_template():
    template = ChatTemplate("{{ messages[0].content }}, {{ bos_token }}")
    before = psutil.Process().children()
    assert [template.render(USER, special_tokens={"bos_token": name}) for name in "ab"] == ["Hi, a", "Hi, b"]
    [child] = [child for child in psutil.Process().children() if child not in before]
    child.kill()
    assert template.render(USER, special_tokens={"bos_token": "\ud800 ü"}) == "Hi, \ud800 ü"
    [child] = [child for child in psutil.Process().children() if child not in before]
    del template
    assert not child.is_running()


def test_a_lower_limit_of_memory_is_kept():
    lines = [json.dumps("Hi {{ x }}"), json.dumps([5.0, 100, {"x": 1}]), ""]
    done = subprocess.run(
        [sys.executable, "-m", "octavo.frontend.text.sandbox"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20)),
    )
    assert json.loads(done.stdout) == ["Hi 1", ""]


def test_a_process_that_cannot_live_is_said_so(monkeypatch):
    monkeypatch.setattr(template_process, "_MODULE", "octavo.no_such_module")
    with pytest.raises(RequestError, match=r"ended the process it runs in \(exit code 1\)"):
        ChatTemplate("{{ 1 }}").render(USER)
