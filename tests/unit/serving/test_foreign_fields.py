"""Fields of well-known programs: translated where octavo has the same thing, else let pass, once told."""

import json

import pytest

from octavo.base.errors import RequestError
from octavo.serving import foreign_fields
from octavo.serving.body import parse_body
from octavo.serving.openai.protocol import ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True}


def read(model=ChatRequest, **fields):
    base = CHAT if model is ChatRequest else {"prompt": "hi"}
    return parse_body(json.dumps({**base, **fields}), model, strict=True)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ({"max_new_tokens": 9}, {"max_tokens": 9}),
        ({"max_new_tokens": 9, "max_tokens": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {"max_tokens": None}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"stopping_strings": ["a"], "stop": None}, {"stop": ["a"]}),
        ({"enable_thinking": False}, {"chat_template_kwargs": OFF}),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True, "a": 1}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": False, "a": 1}},
        ),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": OFF}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 64}},
            {"chat_template_kwargs": ON, "thinking_token_budget": 64},
        ),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning": {"effort": "high", "max_tokens": 5, "exclude": True}},
            {"reasoning_effort": "high", "thinking_token_budget": 5, "include_reasoning": False},
        ),
        ({"reasoning": {"enabled": False}}, {"chat_template_kwargs": OFF}),
        ({"grammar": "root ::= 'a'"}, {"structured_outputs": {"grammar": "root ::= 'a'"}}),
        ({"grammar": "", "json_schema": None}, {"structured_outputs": None}),
        ({"json_schema": {"type": "object"}}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"do_sample": False}, {"temperature": 0}),
        (
            {"options": {"num_predict": 7, "top_k": 3, "num_ctx": 9, "options": {"n": 2}}},
            {"max_tokens": 7, "top_k": 3},
        ),
        ({"sampler_seed": 3, "ban_eos_token": True}, {"seed": 3, "ignore_eos": True}),
    ],
)
def test_what_has_a_meaning_is_translated(sent, meant):
    body = read(**sent)
    assert {name: getattr(body, name) for name in meant} == meant
    assert body.n is None


PROGRAMS = {
    "Open WebUI": {"num_ctx": 8192, "mirostat": 1, "mirostat_tau": 5.0, "num_thread": 4, "keep_alive": "5m"},
    "SillyTavern": {
        "typical_p": 1,
        "rep_pen_range": 0,
        "sampler_order": [6, 0],
        "tfs": 1,
    },
    "llama.cpp": {
        "timings_per_token": True,
        "return_progress": True,
        "samplers": ["top_k"],
        "dry_base": 1.75,
    },
    "OpenRouter": {"provider": {"order": ["a"]}, "models": ["b"], "transforms": []},
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_others_pass_and_are_told_once(program, caplog):
    foreign_fields._noted.clear()
    fields = PROGRAMS[program]
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert read(**fields) == read()
            assert read(CompletionRequest, **fields) == read(CompletionRequest)
    assert all(caplog.text.count(repr(name)) == 1 for name in fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temprature": 1}, "temprature"),
        ({"max_new_tokens": "nine"}, "max_tokens"),
        ({"num_ctxx": 1}, "num_ctxx"),
    ],
)
def test_mistakes_are_still_refused(fields, name):
    with pytest.raises(RequestError, match=name):
        read(**fields)


def test_no_name_is_a_field_of_octavo():
    """Then it would be read as what it is here, and its row would do nothing."""
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not foreign_fields._ALL & known
