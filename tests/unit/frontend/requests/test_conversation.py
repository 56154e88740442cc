"""Conversations of one engine: its parsers, tools told in words, content formats, thinking budgets."""

import dataclasses
import json

import pytest

from octavo.base.errors import ConfigError, RequestError
from octavo.frontend.requests.conversation import ChatRenderer
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.messages.sampling import SamplingParams
from tests.fakes import ByteTokenizer, fake_config
from tests.known_templates import CHATML, GEMMA, MISTRAL, QWEN_2_5

USER = {"role": "user", "content": "Warm?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
THINKS = CHATML + "{% if x %}<think>{% endif %}"


def config(template="", **front):
    made = fake_config()
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, chat_template=template),
        front=dataclasses.replace(made.front, **front),
    )


def renderer(template="", **front):
    return ChatRenderer(config(template, **front), ByteTokenizer())


@pytest.mark.parametrize(
    ("template", "front", "tools", "reasoning"),
    [
        (CHATML, {}, "hermes", ""),
        (CHATML, {"tool_call_parser": "hf", "reasoning_parser": "beam"}, "hermes", ""),
        (CHATML, {"tool_prompt": "never"}, "", ""),
        (QWEN_2_5, {"tool_prompt": "never"}, "hermes", ""),
        (THINKS, {}, "hermes", "think"),
        (THINKS, {"reasoning_parser": "", "tool_call_parser": ""}, "", ""),
        ("{{ tools }}", {}, "", ""),
        (CHATML, {"reasoning_parser": "granite", "tool_call_parser": "mistral"}, "mistral", "granite"),
    ],
)
def test_parsers_are_chosen(template, front, tools, reasoning):
    chat = renderer(template, **front)
    assert (chat.tool_parser, chat.reasoning_parser) == (tools, reasoning)


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_a_mistake_of_the_start(name):
    with pytest.raises(ConfigError, match=r"'wrong'\. Known: "):
        renderer(**{name: "wrong"})


@pytest.mark.parametrize("system", [None, "Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_tools_are_told_to_a_template_that_knows_none(system):
    messages = [USER] if system is None else [{"role": "system", "content": system}, USER]
    text = renderer(CHATML).render_text(messages, tools=[TOOL])["prompt"]
    own = "" if system is None else "Be brief.\n" if isinstance(system, list) else "Be brief.\n\n"
    assert text.startswith(f"<|im_start|>system\n{own}# Tools\n\nYou may call one or more functions")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.endswith("<|im_end|>\n<|im_start|>user\nWarm?<|im_end|>\n<|im_start|>assistant\n")
    assert messages[-1] == USER


def test_calls_and_results_are_told_too():
    messages = [
        USER,
        {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "20 °C"}]},
    ]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    told = (
        "<|im_start|>user\nWarm?<|im_end|>\n"
        f"<|im_start|>assistant\nLet me look.\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n20 °C\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer(CHATML).render_text(messages)["prompt"] == told
    untold = renderer(CHATML, tool_prompt="never").render_text(messages, tools=[TOOL])["prompt"]
    assert "<tool" not in untold


SILENT = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("template", [MISTRAL, GEMMA, SILENT])
def test_where_there_is_no_system_message_tools_stand_before_the_first_turn(template):
    """Refused, or left out: the model would not learn of its tools. Results of one turn are one turn, too."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "tool_call_id": "c", "content": f"{degrees} °C"} for degrees in (20, 21)]
    text = renderer(template).render_text([USER, calling, *results], tools=[TOOL])["prompt"]
    told, _, rest = text.partition("\n\nWarm?")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in told and rest
    responses = [f"<tool_response>\n{degrees} °C\n</tool_response>" for degrees in (20, 21)]
    assert "\n".join(responses) in rest
    assert renderer(template).render_text([USER])["prompt"].count("Warm?") == 1


def test_a_template_that_knows_tools_is_left_alone():
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    text = renderer(QWEN_2_5).render_text(messages, tools=[TOOL])["prompt"]
    assert text == renderer(QWEN_2_5, tool_prompt="never").render_text(messages, tools=[TOOL])["prompt"]
    assert text.count("# Tools") == 1


def test_the_content_format_can_be_fixed():
    assert renderer(PARTS).render_text([USER])["prompt"] == "[Warm?]"
    assert renderer(PARTS, chat_template_content_format="string").render_text([USER])["prompt"] == "[]" * 5
    assert renderer(PARTS).render_text([USER], content_format="string")["prompt"] == "[]" * 5


def test_a_thinking_budget_comes_with_the_tags():
    params = SamplingParams(thinking_token_budget=7)
    sent = (
        InputProcessor(config(THINKS), ByteTokenizer()).process("x", params).engine_requests[0].spec.sampling
    )
    assert sent.thinking_tag_ids == [list(b"<think>"), list(b"</think>")]
    always = config(THINKS, reasoning_parser="deepseek_r1")
    sent = InputProcessor(always, ByteTokenizer()).process("x", params).engine_requests[0].spec.sampling
    assert sent.thinking_tag_ids == [[], list(b"</think>")]
    assert params.thinking_tag_ids is None


@pytest.mark.parametrize(
    ("template", "options", "text"),
    [
        (CHATML, {}, "start the engine with reasoning_parser"),
        (THINKS, {"structured_outputs": {"regex": "a"}}, "exclude each other"),
        (THINKS, {"use_beam_search": True, "best_of": 2, "temperature": 0}, "beam search"),
    ],
)
def test_budgets_that_cannot_be_kept(template, options, text):
    params = SamplingParams(thinking_token_budget=7, **options)
    with pytest.raises(RequestError, match=f"(?i){text}"):
        InputProcessor(config(template), ByteTokenizer()).process("x", params)


@pytest.mark.parametrize(
    "parser", ["think", "gemma4", "openai_gptoss", "granite", "mistral", "seed_oss", "qwen3"]
)
def test_every_reasoning_parser_knows_its_tags(parser):
    processor = InputProcessor(config(CHATML, reasoning_parser=parser), ByteTokenizer())
    params = SamplingParams(thinking_token_budget=0)
    opening, closing = processor.process("x", params).engine_requests[0].spec.sampling.thinking_tag_ids
    assert 0 < len(opening) <= 32
    assert 0 < len(closing) <= 32
