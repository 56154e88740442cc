"""Templates of well-known models: what they make of conversations, against transformers and word by word.

The texts of tests/known_templates.py were compared with what others ship: rendered with and without a system
message, those of ChatML, Llama 2 and 3, Mistral, Gemma, Zephyr, Phi-3, Qwen 2.5 (also with tools and calls),
Vicuna and Alpaca equal the ones in CHAT_TEMPLATES of unsloth 2026.10.9, but for blanks around a first turn of
Llama 2, which Meta's own strips, and default system messages. DeepSeek V3's is the text of its family as in
its repositories' tokenizer_config.json.
"""

import json

import pytest

from octavo.base.errors import RequestError
from octavo.frontend.text.chat_template import ChatTemplate
from tests.known_templates import DEEPSEEK_V3, QWEN_2_5, TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": ' Hi <there> & "you" '},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Größe?\n2 lines"},
]
WITHOUT_SYSTEM = ("Mistral", "Gemma")
IM = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
GOLDEN = {
    "ChatML": IM,
    "Llama 2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]",
    "Llama 3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Mistral": "<s>[INST] Hi [/INST]",
    "Gemma": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "Zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n",
    "Phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n",
    "Qwen 2.5": IM,
    "DeepSeek V3": "<s>Be brief.<｜User｜>Hi<｜Assistant｜>",
    "Vicuna": "<s>Be brief. USER: Hi ASSISTANT:",
    "Alpaca": "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\n",
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Wie <warm>?", "parameters": {"type": "object"}},
    }
]
ARGUMENTS = {"city": "Köln", "days": 2}


def calling(arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 °C"},
    ]


def expected(source, messages, **options):
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    return text


def conversation(name):
    return TALK if name in WITHOUT_SYSTEM else [SYSTEM, *TALK]


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name, opens):
    source, messages = TEMPLATES[name], conversation(name)
    text = ChatTemplate(source).render(messages, special_tokens=SPECIAL, add_generation_prompt=opens)
    assert text == expected(source, messages, add_generation_prompt=opens)


@pytest.mark.parametrize("name", TEMPLATES)
def test_word_by_word(name):
    messages = [*([] if name in WITHOUT_SYSTEM else [SYSTEM]), {"role": "user", "content": "Hi"}]
    assert ChatTemplate(TEMPLATES[name]).render(messages, special_tokens=SPECIAL) == GOLDEN[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_of_content(name):
    template, messages = ChatTemplate(TEMPLATES[name]), conversation(name)
    as_parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    assert template.traits.content_format == "string"
    plain = template.render(messages, special_tokens=SPECIAL)
    assert template.render(as_parts, special_tokens=SPECIAL) == plain
    as_developer = [{**m, "role": m["role"].replace("system", "developer")} for m in as_parts]
    assert template.render(as_developer, special_tokens=SPECIAL) == plain


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_continued(name):
    template = ChatTemplate(TEMPLATES[name])
    messages = [TALK[0], {"role": "assistant", "content": "Well, the"}]
    options = {"add_generation_prompt": False, "special_tokens": SPECIAL}
    text = template.render(messages, continue_final_message=True, **options)
    whole = template.render(messages, **options)
    assert text.endswith("Well, the")
    assert whole.startswith(text)
    assert len(whole) > len(text)


@pytest.mark.parametrize("name", ["Llama 2", "Mistral", "Gemma"])
def test_what_a_template_refuses_is_the_requests_fault(name):
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate(TEMPLATES[name]).render([TALK[0], TALK[2]], special_tokens=SPECIAL)


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
def test_tools_of_qwen(arguments):
    text = ChatTemplate(QWEN_2_5).render(calling(arguments), tools=TOOLS, special_tokens=SPECIAL)
    assert text == expected(QWEN_2_5, calling(ARGUMENTS), tools=TOOLS, add_generation_prompt=True)
    assert f"<tools>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n</tools>" in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n20 °C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    ) in text


@pytest.mark.parametrize(
    "arguments", [ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False)], ids=["object", "text"]
)
def test_calls_of_deepseek_are_text(arguments):
    text = ChatTemplate(DEEPSEEK_V3).render(calling(arguments), special_tokens=SPECIAL)
    as_text = calling(json.dumps(ARGUMENTS, ensure_ascii=False))
    assert text == expected(DEEPSEEK_V3, as_text, add_generation_prompt=True)
    assert 'function<｜tool▁sep｜>weather\n```json\n{"city": "Köln", "days": 2}\n```' in text


def test_missing_content_is_no_word():
    messages = [TALK[0], {"role": "assistant", "tool_calls": None, "content": None}]
    for name in ("ChatML", "Llama 3", "Phi-3"):
        text = ChatTemplate(TEMPLATES[name]).render(messages, special_tokens=SPECIAL)
        assert "None" not in text


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "{"])
def test_arguments_that_are_no_object_stay(arguments):
    text = ChatTemplate(QWEN_2_5).render(calling(arguments), special_tokens=SPECIAL)
    assert f'"arguments": {json.dumps(arguments)}' in text


@pytest.mark.parametrize("calls", ["x", [1], [{"function": "f"}]])
def test_calls_of_a_wrong_form(calls):
    with pytest.raises(RequestError, match="tool_calls must be a list"):
        ChatTemplate(QWEN_2_5).render([{"role": "assistant", "tool_calls": calls}])


def test_documents_reach_the_template():
    source = "{% for d in documents %}{{ d.title }}: {{ d['text'] }}\n{% endfor %}{{ messages[0].content }}"
    documents = [{"title": "a", "text": "b"}]
    assert ChatTemplate(source).render(TALK[:1], documents=documents) == f"a: b\n{TALK[0]['content']}"
