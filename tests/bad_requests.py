"""Requests that no client should send: rows for tests/integration/test_bad_requests.py and for a live server.

    python -m tests.bad_requests http://127.0.0.1:8000

sends the same rows to a running server (one with a context of at most 16384 tokens). A row is a fault in one
place of a request that is right otherwise. Each must be answered as its row says, in the form of an error,
without a word about the machine; and nobody else may notice: the canary's text stays what it was.
"""

import json
import re
import sys
import time
from dataclasses import dataclass, field

import httpx

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "seed": 0}
TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
JSON = {"Content-Type": "application/json"}
MAX_ERROR_BYTES = 4096
_LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|site-packages|/(home|tmp|usr|work|root)/|<\w+ object")
_NOT_NUMBERS = ["one", [], {}, True, [1], {"a": 1}]
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
    "truncate_prompt_tokens": ["one", [], 0.5, -2, 10**6, *_HUGE],
    "truncation_side": [5, "middle", "", []],
    "priority": [*_NOT_INTEGERS, 2**31, -(2**31) - 1, *_HUGE],
    "timeout": [*_NOT_NUMBERS, 0, -1],
    "deadline_s": [*_NOT_NUMBERS, 0, -1],
    "request_id": [*_NOT_TEXTS, "", "x" * 129, "a b", "a\nb", "\u00e9", "\x00"],
    "cache_salt": [*_NOT_TEXTS, "", "x" * 1025],
    "stream_options": [5, "x", [], True, {"include_usage": 1}, {"no_such": True}, {"include_usage": True}],
    "length_penalty": ["one", [], {}],
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
    "max_completion_tokens": [0, -1, "four", 1.5, 10**9, 2**64],
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
    "prompt": [
        "\x00",
        "\ud83d\ude00" * 9,
        "\u202e",
        "\ufffe",
        ["a", "b"],
        [0, 1, 2],
        [[1], [2, 3]],
    ],
    "request_id": [None, "x", "!~" * 64],
    "stream_options": [None],
}
"""Odd, and allowed."""

BODIES = [
    *(b"", b" ", b"{", b"}", b'{"', b'{"a"', b'{"a":', b'{"a":1', b'{"a":1,}', b"[]", b"[1]", b"5", b'"x"'),
    *(b"true", b"null", b"undefined", b"{}", b"{}{}", b"{} x", b"{'a': 1}", b"{a: 1}", b"// x\n{}", b"\x00"),
    *(b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08", b"\x80\x04}.", b'{"prompt": "\xff"}'),
    *(b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}'),
    *(b'{"prompt": "\n"}', b'{"prompt": "\\x41"}', b'{"prompt": "a', b'{"\\ud800": 1}', b'{"prompt": -}'),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    b'{"messages":' + b'[{"content":' * 900 + b"1" + b"}]" * 900 + b"}",
    *(
        b"prompt=hello&max_tokens=4",
        b"<x/>",
        b"--x\r\n\r\n",
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
    ),
    b"{" + b",".join(b'"k%d": 1' % i for i in range(50_000)) + b"}",
]
MEDIA_TYPES = [
    *("", "text/plain", "text/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("application/xml", "application/octet-stream", "json", "application/jsonx", "application/ json", "*/*"),
    *("text/plain; application/json", "x" * 5000),
]
OTHER_BODIES = [
    *(("/tokenize", text) for text in ("{}", '{"prompt": 5}', '{"prompt": null}', '{"prompt": ["a"]}')),
    *(("/tokenize", text) for text in ('{"prompt": "a", "messages": []}', '{"messages": []}')),
    *(
        ("/tokenize", text)
        for text in ('{"prompt": "a", "x": 1}', '{"prompt": "a", "add_special_tokens": 1}')
    ),
    *(("/detokenize", text) for text in ("{}", '{"tokens": null}', '{"tokens": "1"}', '{"tokens": [1.5]}')),
    *(
        ("/detokenize", f'{{"tokens": [{token}]}}')
        for token in (-1, 2**31, 2**63, 10**30, "null", '"1"', "[]")
    ),
    ("/detokenize", json.dumps({"tokens": [1] * 200_000})),
    *(("/generate", text) for text in ("{}", '{"prompt": 5}', '{"prompt": "a", "n": 0}', '{"prompt": []}')),
    *(("/generate", text) for text in ('{"prompt": "a", "max_tokens": 0}', '{"prompt": ["a", "b"]}')),
    *(("/v1/chat/completions/batch", text) for text in ("{}", '{"messages": []}', '{"messages": [[]]}')),
    *(
        ("/v1/chat/completions/batch", text)
        for text in ('{"messages": [[5]]}', '{"messages": [{"role": "user"}]}')
    ),
]
HEADERS = [
    *(("X-Request-Id", text) for text in ("", "x" * 5000, "a b", "../../etc/passwd", "\x7f", "${jndi:x}")),
    *(
        ("traceparent", text)
        for text in ("", "x", "00-0-0-0", "ff-" + "f" * 32 + "-" + "f" * 16 + "-ff", "a" * 5000)
    ),
    *(("X-data-parallel-rank", text) for text in ("-1", "x", "9" * 400)),
    *(("Accept", text) for text in ("text/html", "x", "a" * 5000)),
    *(("Accept-Encoding", text) for text in ("gzip;q=x", "*;q=0")),
    *(("Expect", text) for text in ("100-continue",)),
    *(("Authorization", text) for text in ("", "Bearer", "Basic x", "Bearer " + "k" * 5000)),
    *(("Range", "bytes=0-1"), ("Cookie", "a=" + "b" * 5000), ("X-Forwarded-For", "x" * 5000)),
]


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


def rows():
    """All of them."""
    for path, base, tables in ((COMPLETION, TEXT, (WRONG,)), (CHAT, TALK, (WRONG | WRONG_CHAT,))):
        for table in tables:
            yield from (_row(path, base, name, value) for name, values in table.items() for value in values)
        for name, values in RIGHT.items():
            yield from (_row(path, base, name, value, 200) for value in values if _is_field_of(path, name))
    yield from (_row(COMPLETION, TEXT, "prompt", value) for value in WRONG_PROMPTS)
    yield from (_row(CHAT, TALK, "messages", value) for value in WRONG_MESSAGES)
    yield from _bodies()
    yield from _other_routes()


def _is_field_of(path, name):
    return path == COMPLETION or name != "prompt"


def _row(path, base, name, value, status=400):
    content = json.dumps({**base, name: value}).encode()
    statuses = {"model": (status, 404)}.get(name, (status,))
    return Row(f"{path} {name}={value!r:.40}", path, content, statuses)


def _bodies():
    """Bodies that are no JSON, or none of ours; and media types that are not JSON's."""
    good = json.dumps(TEXT).encode()
    for content in BODIES:
        yield Row(f"body {content[:30]!r}", COMPLETION, content)
        yield Row(f"chat body {content[:30]!r}", CHAT, content)
    for field_name in ("temperature", "max_tokens", "n", "seed", "prompt", "logit_bias"):
        for literal in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "+1", "01", "1.", ".5", "0x1"):
            content = json.dumps({**TEXT, field_name: "@"}).replace('"@"', literal).encode()
            yield Row(f"{field_name}={literal}", COMPLETION, content)
    doubled = b'{"prompt": "hello", "max_tokens": -1, "max_tokens": 4}'
    yield Row("a field twice, the last one right", COMPLETION, doubled, (200, 400))
    yield Row(
        "a field twice, the last one wrong", COMPLETION, doubled.replace(b"-1", b"4").replace(b"4}", b"-1}")
    )
    yield Row("white space around", COMPLETION, b" \r\n\t" + good + b"\n" * 1000, (200,))
    for media_type in MEDIA_TYPES:
        yield Row(f"media type {media_type}", COMPLETION, good, (415,), headers={"Content-Type": media_type})
    yield Row("no media type", COMPLETION, good, (415,), headers={})
    for coding in ("gzip", "br", "deflate", "gzip, identity", "x"):
        yield Row(f"coding {coding}", COMPLETION, good, (415,), headers={**JSON, "Content-Encoding": coding})
    yield Row("17 MB", COMPLETION, b'{"prompt": "' + b"a" * (17 << 20) + b'"}', (413,))


def _other_routes():
    for path, content in OTHER_BODIES:
        yield Row(f"{path} {content[:40]}", path, content.encode())
    for path in (COMPLETION, CHAT, "/tokenize", "/detokenize", "/generate"):
        for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD", "TRACE", "OPTIONS", "BREW"):
            statuses = {"BREW": (400, 405), "OPTIONS": (204,)}.get(method, (405,))
            yield Row(f"{method} {path}", path, b"", statuses, method=method)
        yield Row(f"{path} null", path, b"null")
    for path in ("/v1", "/v1/", "/v1/completions/", "//v1/completions", "/V1/completions", "/x" * 4000):
        yield Row(f"POST {path[:30]}", path, json.dumps(TEXT).encode(), (404,))
    for name in ("x", "..", "%2e%2e%2fetc", "a" * 4000, "%00", "%ff", "\u00e9", "x?y=z", "x/y"):
        yield Row(f"model {name[:20]}", f"/v1/models/{name}", b"", (400, 404), method="GET", headers={})
    for path in ("/sleep", "/collective_rpc", "/reset_prefix_cache", "/update_weights", "/server_info"):
        yield Row(path, path, b"{}", (404, 405))
    for name, value in HEADERS:
        row = Row(
            f"header {name}", COMPLETION, json.dumps(TEXT).encode(), (200, 400), headers={**JSON, name: value}
        )
        yield row


def faults(row, answer):
    """What is wrong with an answer (httpx.Response) to `row`; nothing, if all is well."""
    if answer.status_code not in row.statuses:
        yield f"status {answer.status_code}, not one of {row.statuses}: {answer.text[:200]}"
    if answer.status_code < 400 or row.method == "HEAD":
        return
    if len(answer.content) > MAX_ERROR_BYTES:
        yield f"an error of {len(answer.content)} bytes"
    if found := _LEAK.search(answer.text):
        yield f"a leak: {found[0]}"
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        yield f"no error object: {answer.text[:100]}"
        return
    if {*error} != {"message", "type", "param", "code"} or not error["message"] or not error["type"]:
        yield f"an error of another form: {error}"
    if error["code"] != answer.status_code:
        yield f"code {error['code']}, but status {answer.status_code}"


def request_of(client, row):
    """The row as an httpx request."""
    return client.build_request(row.method, row.path, content=row.content, headers=row.headers)


def main(url):
    """Send all rows to a running server; the number of those that failed."""
    num_failed = num_sent = 0
    with httpx.Client(base_url=url, timeout=60) as client:
        ask = lambda: client.post(COMPLETION, json=TEXT).json()["choices"][0]["text"]  # noqa: E731
        canary = ask()
        for row in rows():
            num_sent += 1
            began_s = time.monotonic()
            found = list(faults(row, client.send(request_of(client, row))))
            if (took_s := time.monotonic() - began_s) > row.max_s:
                found.append(f"took {took_s:.1f} s")
            if num_sent % 50 == 0 and ask() != canary:
                found.append("the canary's text has changed")
            num_failed += bool(found)
            for fault in found:
                print(f"{row.name}: {fault}")
    print(f"{num_failed} of {num_sent} rows failed")
    return num_failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1])))
