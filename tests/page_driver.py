"""What the tests of the page do with it: ask, read, stand in for the server."""

import json
import re
import time
from pathlib import Path

from playwright.sync_api import expect

CHROMIUM = next(
    (path for path in map(Path, ("/usr/bin/chromium", "/usr/bin/chromium-browser")) if path.exists()), None
)
KEY = "a-key-of-the-tests"


def ask(page, text):
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def hear(page, text):
    """Ask, and wait for the end of the answer."""
    questions = page.locator("li.user")
    number = questions.count()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, text)
    expect(questions).to_have_count(number + 1)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def metric(server, name):
    found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def answer(page):
    return page.locator("li.assistant").last


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answers(page, *texts, fails=()):
    """Let the answers be these; those whose numbers are in `fails` break off. Returns what is asked."""
    asked = []

    def reply(route):
        body = stream_of({"content": texts[len(asked)]})
        cut = len(asked) in fails
        asked.append([message["content"] for message in json.loads(route.request.post_data)["messages"]])
        route.fulfill(content_type="text/event-stream", body=body.split("data: [DONE]")[0] if cut else body)

    page.context.route("**/v1/chat/completions", reply)
    return asked


def said(page):
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return page.locator("#messages > li > .text").all_inner_texts()


def stream_of(*deltas, finish="stop"):
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def luminance(color):
    """Relative luminance of WCAG 2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, two):
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)
