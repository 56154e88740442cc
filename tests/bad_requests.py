"""Requests that no client should send: rows for tests/integration/test_bad_requests.py and for a live server.

    python -m tests.bad_requests http://127.0.0.1:8000 MODEL

sends the same rows to a running server. A row is a fault in one place of a request that is right otherwise.
Each must be answered as its row says, in the form of an error, without a word about the machine; and nobody
else may notice: the canary's text stays what it was.
"""

import json
import re
import sys
import time
from dataclasses import dataclass, field

import httpx

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
JSON = {"Content-Type": "application/json"}
MAX_ERROR_BYTES = 4096
_LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|site-packages|/(home|tmp|usr|work|root)/|<\w+ object")
_NOT_NUMBERS = ["1", [], {}, True, [1], {"a": 1}]
_NOT_INTEGERS = [*_NOT_NUMBERS, 0.5, 1e300]
_NOT_FLAGS = ["true", 1, 0, [], {}, 1.0]
_NOT_TEXTS = [5, True, {}, 1.5]
_NOT_IDS = [5, "1", {}, [True], ["1"], [1.5], [None], [[1]], [-1], [2**31], [2**63], [2**64], [10**400]]
_HUGE = [2**63, 2**64, 10**30, 10**4000]

WRONG = {
    "temperature": [*_NOT_NUMBERS, -1e-9, -0.5, 2.0001, 1e308],
    "top_p": [*_NOT_NUMBERS, 0, -1, 1.0000001, 1e308],
    "top_k": [*_NOT_INTEGERS, -2, -(2**63), *_HUGE],
    "min_p": [*_NOT_NUMBERS, -0.01, 1.01],
    "presence_penalty": [*_NOT_NUMBERS, -2.01, 2.01, 1e308],
    "frequency_penalty": [*_NOT_NUMBERS, -2.01, 2.01, -1e308],
    "repetition_penalty": [*_NOT_NUMBERS, 0, -1, -1e308],
    "n": [*_NOT_INTEGERS, 0, -1, 16385, *_HUGE],
    "best_of": [*_NOT_INTEGERS, 0, -1, 16385, *_HUGE],
    "max_tokens": [*_NOT_INTEGERS, -1, -(2**63), 10**9, *_HUGE],
    "min_tokens": [*_NOT_INTEGERS, -1, 5, 2**31, *_HUGE],
    "seed": [*_NOT_INTEGERS, 2**63, -(2**63) - 1, 10**4000],
    "logit_bias": [
        5,
        "1",
        [],
        [[1, 2]],
        {"a": 1},
        {"1.5": 1},
        {"": 1},
        {"-1": 1},
        {"1": "2"},
        {"1": None},
        {"1": [1]},
        {"1": True},
        {str(2**31): 1},
        {str(2**64): 1},
        {"9" * 4000: 1},
        {"0x10": 1},
        {"\u0661": "1"},
    ],
    "allowed_token_ids": [*_NOT_IDS, []],
    "forbidden_token_ids": _NOT_IDS,
    "stop_token_ids": _NOT_IDS,
    "logprob_token_ids": [*_NOT_IDS, [], list(range(129))],
    "stop": [5, True, {}, [1], [None], [[]], "", [""], ["a", ""], ["x"] * 65, "x" * 4097, {"a": "b"}],
    "bad_words": [5, "x", {}, [1], [None], [[]], [""], ["x"] * 129, ["x" * 5000]],
    "ignore_eos": _NOT_FLAGS,
    "skip_special_tokens": _NOT_FLAGS,
    "spaces_between_special_tokens": _NOT_FLAGS,
    "include_stop_str_in_output": _NOT_FLAGS,
    "add_special_tokens": _NOT_FLAGS,
    "return_token_ids": _NOT_FLAGS,
    "use_beam_search": _NOT_FLAGS,
    "echo": _NOT_FLAGS,
    "stream": [*_NOT_FLAGS, "yes"],
    "prompt_logprobs": [*_NOT_INTEGERS[:3], 0.5, -2, 2**31, *_HUGE],
    "truncate_prompt_tokens": ["1", [], 0.5, -2, 10**6, *_HUGE],
    "truncation_side": [5, "middle", "", []],
    "priority": [*_NOT_INTEGERS, 2**31, -(2**31) - 1, *_HUGE],
    "timeout": [*_NOT_NUMBERS, 0, -1],
    "deadline_s": [*_NOT_NUMBERS, 0, -1],
    "request_id": [*_NOT_TEXTS, "", "x" * 129, "a b", "a\nb", "\u00e9", "\x00"],
    "cache_salt": [*_NOT_TEXTS, "", "x" * 1025],
    "stream_options": [5, "x", [], True, {"include_usage": 1}, {"no_such": True}, {"include_usage": True}],
    "length_penalty": ["1", [], {}],
    "early_stopping": ["always", 1, []],
    "num_beam_groups": [*_NOT_INTEGERS, 0, -1],
    "diversity_penalty": [*_NOT_NUMBERS, -1],
    "repetition_detection": [5, "x", [], {"max_pattern_size": -1}, {"max_pattern_size": 2, "min_count": 1}],
    "stream_interval": [*_NOT_INTEGERS, 0, -1],
    "vllm_xargs": [5, "x", [], {"a": {}}, {"a": 2**64}, {"a": [[1]]}, {"a": None}],
    "model": [*_NOT_TEXTS, []],
    "kv_transfer_params": [{"do_remote_prefill": True}],
    "chat_template": ["{{ 1 }}"],
    "functions": [[{"name": "f"}]],
    "suffix": ["end"],
    "no_such_field": [None, 1, {}],
    "__class__": ["x"],
    "": [1],
}
"""By field: what completions must refuse with 400, whatever the rest of the request says."""

WRONG_PROMPTS = [
    *(None, 5, True, {}, {"prompt": "x"}, [], [[]], [[], [1]], [""] * 1025, [1, "a"], ["a", 1], [["a"]]),
    *([[[1]]], [None], [1.5], [-1], [2**31], [2**63], [10**400], [[1], "a"], [[1], [-1]], [True], [[True]]),
    *([{}], [["a"], [1]], "x" * 300_000, [1] * 100_000, [[1] * 100_000], ["a"] * 1025, [[1]] * 1025),
]
WRONG_MESSAGES = [
    *(None, 5, "hi", {}, [], [5], ["hi"], [None], [[]], [{}], [{"role": "user", "content": 5}]),
    *([{"content": "x"}], [{"role": None, "content": "x"}], [{"role": 5, "content": "x"}]),
    *([{"role": "user", "content": {}}], [{"role": "user", "content": [5]}], [{"role": ["user"]}]),
    *([{"role": "user", "content": [{}]}], [{"role": "user", "content": [{"type": "text"}]}]),
    *([{"role": "user", "content": [{"type": "text", "text": 5}]}], [{"role": "user", "content": True}]),
    *([{"role": "user", "content": [{"type": 5, "text": "x"}]}], [{"role": "user", "content": 1.5}]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "http://169.254.169.254/"}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    [{"role": "user", "content": [{"type": "no_such", "text": "x"}]}],
    [{"role": "user", "content": "x"}] * 4097,
    [{"role": "user", "content": "x" * 300_000}],
    [{"role": "user", "content": [{"type": "text", "text": "x" * 1000}] * 300}],
]
WRONG_CHAT = {
    "logprobs": [1, "true", [], {}],
    "top_logprobs": [5, -2, 10**6, "1", 1.5, True],
    "max_completion_tokens": [0, -1, "4", 1.5, 10**9, 2**64],
    "add_generation_prompt": ["x", 1],
    "continue_final_message": ["x", 1],
    "chat_template_kwargs": ["x", 5, [], [["a", 1]]],
    "documents": ["x", 5, {}, [5], ["x"]],
    "tools": ["x", 5, {}, [5], [None], [{}], [{"type": "function"}], [{"type": "x", "function": {}}]],
    "tool_choice": [5, "maybe", [], {}, "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": ["x", 1],
    "reasoning_effort": [5, "enormous", []],
    "chat_template": ["{{ cycler.__init__.__globals__ }}", "{% for i in range(10**9) %}{% endfor %}"],
    "response_format": [5, "json", [], {}, {"type": "yaml"}, {"type": 5}, {"type": "json_schema"}],
    "modalities": [["audio"]],
    "audio": [{"voice": "x"}],
    "mm_processor_kwargs": [{"code_revision": "x"}],
}
RIGHT = {
    "temperature": [None, 0, 1e-30, 2, 1],
    "top_p": [None, 1, 1e-30],
    "top_k": [None, 0, -1, 10**12, 2**63 - 1],
    "min_p": [None, 0, 1],
    "logit_bias": [None, {}, {"0": 1e9}, {"1": -1e308}],
    "stop": [None, [], "x", ["x"] * 64, "\x00", "\ud83d\ude00", "x" * 4096],
    "bad_words": [None, [], ["\u00e9"]],
    "seed": [None, -1, 0, 2**63 - 1, -(2**63)],
    "user": [None, "x", 5, {"a": 1}],
    "metadata": [{"a": "b"}],
    "vllm_xargs": [None, {}, {"a": [1, "x", True, 0.5]}],
    "truncate_prompt_tokens": [None, -1, 2],
    "prompt": ["\x00", "\ud83d\ude00" * 9, "\u202e", "\ufffe", ["a", "b"], [0, 1, 2], [[1], [2, 3]], "</s><s>"],
    "request_id": [None, "x", "!~" * 64],
    "stream_options": [None],
}
"""Odd, and allowed."""


@dataclass(frozen=True)
class Row:
    """One request; content: JSON text, or any bytes."""

    name: str
    path: str
    content: bytes
    statuses: tuple[int, ...] = (400,)
    method: str = "POST"
    headers: dict = field(default_factory=lambda: dict(JSON))
    max_s: float = 10.0


def of_fields():
    """Rows of JSON bodies with one wrong field, and of odd ones that are right."""
    for path, base, tables in ((COMPLETION, TEXT, (WRONG,)), (CHAT, TALK, (WRONG, WRONG_CHAT))):
        for table in tables:
            yield from (_changed(path, base, name, value) for name in table for value in _wrong(table, name))
        yield from (
            _changed(path, base, name, value, 200)
            for name in RIGHT
            for value in RIGHT[name]
            if path == COMPLETION or name not in ("prompt", "best_of")
        )
    for value in WRONG_PROMPTS:
        yield _changed(COMPLETION, TEXT, "prompt", value)
    for value in WRONG_MESSAGES:
        yield _changed(CHAT, TALK, "messages", value)


def _wrong(table, name):
    return table[name]


def _changed(path, base, name, value, status=400):
    body = {**base, name: value}
    if table_needs_logprobs(name):
        body["logprobs"] = None
    text = f"{path} {name}={value!r:.40}"
    statuses = (status,) if name != "model" else (status, 404)
    return Row(text, path, json.dumps(body).encode(), statuses)


def table_needs_logprobs(name):
    return False
