"""The page in a browser, in front of a real server whose model is a fake: chat, keys, dashboard, looks."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.page_driver import (
    KEY,
    answer,
    answers,
    ask,
    contrast,
    hear,
    luminance,
    metric,
    said,
    stream_of,
    wait_until,
)


def test_an_answer_is_seen_while_it_comes(visit, server):
    page = visit(num_tokens=120)
    expect(page.get_by_label("Model")).to_have_value("fake")
    page.get_by_label("Message").focus()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    ask(page, "hello")
    expect(page.locator("li.user")).to_have_text("hello")
    page.locator("#stop").wait_for()
    text = answer(page).locator(".text")
    wait_until(lambda: len(text.inner_text()) > 5)
    early = text.inner_text()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert len(text.inner_text()) > len(early) + 20
    notes = answer(page).locator(".notes").inner_text()
    speed = float(re.search(r"([\d.]+) tokens/s", notes)[1])
    assert 0.5 < speed < 200, "a step takes 10 ms at least"
    assert re.search(r"first token (\d{2,3} ms|[\d.]+ s)", notes)
    assert "120 tokens" in notes
    assert "reached its length" in notes
    assert {url.split("/")[2] for url in page.asked} == {server.url.split("/")[2]}, "nobody else was asked"


def test_stop_ends_the_answer_here_and_in_the_engine(visit, server):
    page = visit(num_tokens=2000)
    for way in ("key", "button"):
        ask(page, f"stop by {way}")
        wait_until(lambda: len(answer(page).locator(".text").inner_text()) > 5)
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 1)
        page.keyboard.press("Escape") if way == "key" else page.locator("#stop").click()
        expect(answer(page).locator(".notes")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 0)


def test_what_is_sent(visit):
    page = visit(num_tokens=3)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top k").fill("7")
    page.get_by_label("Seed").fill("")
    page.keyboard.press("Escape")
    box = page.get_by_label("Message")
    box.fill("one")
    box.press("Shift+Enter")
    box.type("two")
    with page.expect_request("**/v1/chat/completions") as asked:
        box.press("Enter")
    body = json.loads(asked.value.post_data)
    assert body.pop("messages") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
    ]
    del body["stream_options"]
    added = {"max_tokens": 3, "ignore_eos": True}
    assert body | added == {"model": "fake", "temperature": 0.5, "top_k": 7, "stream": True} | added
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    said = page.evaluate("document.querySelector('li.assistant .text').textContent")
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "three")
    roles = [message["role"] for message in json.loads(asked.value.post_data)["messages"]]
    assert roles == (["system", "user", "assistant", "user"] if said else ["system", "user"])
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("heading", name="What is on your mind?")).to_be_visible()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "four")
    assert [m["content"] for m in json.loads(asked.value.post_data)["messages"]] == ["Be brief.", "four"]
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")


def test_an_error_is_told_and_the_question_can_be_asked_again(visit):
    page = visit(num_tokens=5, may_complain=True)
    ask(page, "x" * 5000)
    fault = page.get_by_role("alert")
    expect(fault).to_contain_text("tokens")
    fault.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_have_count(1)
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "short")
    messages = json.loads(asked.value.post_data)["messages"]
    assert messages == [{"role": "user", "content": "short"}], "what got no answer is not said again"


def test_trying_again_repeats_the_turn_it_belongs_to(visit):
    page = visit(may_complain=True)
    asked = answers(page, "half", "two", "one", "three", fails=[0])
    ask(page, "first")
    expect(page.get_by_role("alert")).to_contain_text("cut")
    ask(page, "second")
    assert said(page) == ["first", "half", "second", "two"]
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    assert said(page) == ["first", "one", "second", "two"]
    ask(page, "third")
    said(page)
    assert asked == [
        ["first"],
        ["first", "half", "second"],
        ["first"],
        ["first", "one", "second", "two", "third"],
    ]


def test_turns_can_be_removed_and_edited(visit):
    page = visit()
    asked = answers(page, "one", "two", "three", "four", "five")
    for text in ("first", "second", "third"):
        ask(page, text)
        said(page)
    question = page.locator("li.user")
    question.nth(0).hover()
    question.nth(0).get_by_role("button", name="Remove this turn").click()
    assert said(page) == ["second", "two", "third", "three"]
    question.nth(0).hover()
    question.nth(0).get_by_role("button", name="Edit this question").click()
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    expect(question.nth(0)).to_contain_text("A new branch: what was said before stays.")
    page.keyboard.press("Escape")
    assert said(page) == ["second", "two", "third", "three"]
    question.nth(0).hover()
    question.nth(0).get_by_role("button", name="Edit this question").click()
    page.get_by_label("Question", exact=True).fill("another")
    page.keyboard.press("Enter")
    expect(page.locator("li.assistant .text").last).to_have_text("four")
    assert said(page) == ["another", "four"]
    ask(page, "last")
    said(page)
    assert asked[3:] == [["another"], ["another", "four", "last"]]


@pytest.mark.slow
def test_there_is_a_way_out_of_a_full_context(visit):
    page = visit(num_tokens=5, may_complain=True)
    for text in ("first " * 250, "second " * 250):
        hear(page, text)
        expect(answer(page).locator(".notes")).to_contain_text("5 tokens")
    hear(page, "third " * 250)
    fault = page.get_by_role("alert")
    expect(fault).to_contain_text("context length")
    with page.expect_request("**/v1/chat/completions") as request:
        fault.get_by_role("button", name="Leave out the oldest turns").click()
    messages = json.loads(request.value.post_data)["messages"]
    words = [message["content"].split()[0] for message in messages if message["role"] == "user"]
    assert words == ["second", "third"]
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(answer(page).locator(".notes")).to_contain_text("5 tokens")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    hear(page, "alone " * 1000)
    expect(fault).to_contain_text("context length")
    expect(fault.get_by_role("button")).to_have_text(["Try again", "Edit"])
    fault.get_by_role("button", name="Edit").click()
    page.get_by_label("Question", exact=True).fill("short")
    page.get_by_role("button", name="Ask again").click()
    expect(answer(page).locator(".notes")).to_contain_text("5 tokens")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("label", "value", "words"),
    [
        ("Temperature", "9", "A number from 0 to 2."),
        ("Top p", "0", "A number from 0.01 to 1."),
        ("Top k", "1.5", "A whole number, 0 or more."),
        ("Max tokens", "0", "A whole number, 1 or more."),
    ],
)
def test_a_value_out_of_range_is_marked_and_not_dropped(visit, label, value, words):
    page = visit(num_tokens=5)
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label(label)
    page.get_by_text("Length and end").click()
    expect(field).to_have_attribute("aria-invalid", "false")
    field.fill(value)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("label", has=field)).to_contain_text(words)
    page.keyboard.press("Enter")
    page.reload()
    ask(page, "hello")
    expect(field).to_be_focused()
    expect(page.locator("label", has=field)).to_contain_text(words)
    expect(page.locator("li.user")).to_have_count(0)
    field.fill("1")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Message")).to_have_value("hello")
    page.get_by_label("Message").press("Enter")
    expect(answer(page).locator(".notes")).to_contain_text("token")


@pytest.mark.slow
def test_a_value_between_two_steps_is_fine(visit):
    page = visit(num_tokens=5)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.333")
    expect(page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "false")
    page.keyboard.press("Escape")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "hello")
    assert json.loads(request.value.post_data)["temperature"] == 0.333
    expect(answer(page).locator(".notes")).to_contain_text("5 tokens")


def test_a_stream_that_is_cut_is_no_answer(visit):
    page = visit(may_complain=True)
    cut = 'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'
    page.context.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut)
    )
    ask(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("cut before the answer was complete")
    expect(answer(page).locator(".text")).to_have_text("half")


def test_reasoning_is_folded_and_calls_are_shown(visit):
    page = visit()
    body = stream_of(
        {"role": "assistant", "content": ""},
        *({"reasoning": part, "reasoning_content": part} for part in ("The user *asks* ", "<b>twice</b>.")),
        {"content": "Let me look."},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "weather"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "K\u00f6ln", '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"days": [1, 2]}'}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "<i>", "arguments": '{"cut'}}]},
        finish="tool_calls",
    )
    page.context.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    ask(page, "hello")
    expect(answer(page).locator(".notes")).to_contain_text("calls tools")
    expect(answer(page).locator(".text")).to_have_text("Let me look.")
    thought = answer(page).locator("details.reasoning")
    expect(thought.locator("summary")).to_have_text("Reasoning")
    expect(thought.locator(".thought")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator(".thought")).to_be_visible()
    expect(thought.locator(".thought")).to_have_text("The user asks <b>twice</b>.")
    calls = answer(page).locator("details.call")
    expect(calls.locator("strong")).to_have_text(["weather", "<i>"])
    shown = calls.locator("pre").all_text_contents()
    assert shown == ['{\n  "city": "Köln",\n  "days": [\n    1,\n    2\n  ]\n}', '{"cut']


@pytest.mark.slow
def test_the_figures_of_the_dashboard_move(visit):
    page = visit(num_tokens=4000)
    ask(page, "a long one")
    page.get_by_role("link", name="Dashboard").click()

    def figure(title):
        tile = page.locator("section.tile", has=page.get_by_role("heading", name=title, exact=True))
        texts = tile.locator("dd").all_inner_texts() or ["–"]
        return float(re.match(r"[\d.]+|–", texts[0])[0].replace("–", "nan"))

    expect(page.locator("#pulse")).to_contain_text("Live")
    wait_until(lambda: figure("Requests") == 1)
    wait_until(lambda: 1 < figure("Tokens per second") < 101)
    wait_until(lambda: 5 < figure("Between tokens") < 1000)
    first = page.locator("path.line-0").first.get_attribute("d")
    wait_until(lambda: page.locator("path.line-0").first.get_attribute("d") != first)
    page.keyboard.press("Escape")
    wait_until(lambda: figure("Requests") == 0)
    wait_until(lambda: figure("Tokens per second") == 0)


def test_tiles_of_guesses_where_there_are_some(visit):
    page, num_read = visit(), 0
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("#pulse")).to_contain_text("Live")
    tiles = [
        page.locator("section.tile", has=page.get_by_role("heading", name=name, include_hidden=True))
        for name in ("Guessed tokens", "Tokens per guess")
    ]
    for tile in tiles:
        expect(tile).to_be_hidden()
    expect(page.locator("section.tile:visible")).to_have_count(8)

    def count(route):
        nonlocal num_read
        num_read += 1
        counts = {"drafts": 30, "draft_tokens": 100, "accepted_tokens": 75}
        route.fulfill(
            body="".join(
                f'vllm:spec_decode_num_{name}_total{{engine="0"}} {each * num_read}\n'
                for name, each in counts.items()
            )
        )

    page.context.route("**/metrics", count)
    for tile, shown in zip(tiles, ("75 %", "3.5"), strict=True):
        expect(tile.locator("dd")).to_have_text(shown)
        expect(tile).to_be_visible()


def test_a_server_with_keys(visit, servers):
    servers[1].wait_for_status(200)
    page = visit(url=servers[1].url, num_tokens=5, may_complain=True)
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    expect(page.get_by_role("alert")).to_have_text("This server asks for an API key.")
    field.fill("another key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server does not accept this key.")
    expect(field).to_be_focused()
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_label("Model")).to_have_value("fake")
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("#key-fault")).to_be_empty()
    page.keyboard.press("Escape")
    ask(page, "hello")
    expect(answer(page).locator(".notes")).to_contain_text("5 tokens")
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("#pulse")).to_contain_text("Live")
    kept = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert kept[0] == [KEY]
    assert KEY not in json.dumps(kept[1:])


def test_the_description_of_the_api_can_be_read_and_tried(visit, server):
    page = visit("/docs")
    for heading in ("OpenAI", "Anthropic", "Monitoring", "Operators"):
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
    page.get_by_label("Filter").fill("/v1/completions")
    expect(page.locator("details.operation:visible")).to_have_count(1)
    page.locator("details.operation:visible > summary").click()
    fields = page.locator("details.operation[open] .fields").first
    expect(fields.get_by_role("rowheader", name="temperature", exact=True)).to_be_visible()
    body = page.get_by_label("Body")
    body.fill(json.dumps({"prompt": "hello", "max_tokens": 3, "ignore_eos": True}))
    page.locator("details.operation[open]").get_by_role("button", name="Send").click()
    expect(page.locator("details.operation[open] .answer")).to_contain_text('"completion_tokens": 3')
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert {url.split("/")[2] for url in page.asked} == {server.url.split("/")[2]}, "nobody else was asked"


def test_the_description_asks_for_the_key(visit, servers):
    servers[1].wait_for_status(200)
    page = visit("/docs", url=servers[1].url, may_complain=True)
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="OpenAI", exact=True)).to_be_visible()


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(visit, width):
    page = visit(viewport={"width": width, "height": 780}, is_mobile=width < 500)
    page.locator("select#model:has-text('fake')").wait_for()
    for view in ("Chat", "Dashboard"):
        page.get_by_role("link", name=view, exact=True).click()
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            check_looks(page, view, scheme, width)


def check_looks(page, view, scheme, width):
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        """[...document.querySelectorAll("header *, .view:not([hidden]) *")].filter((node) => {
            const box = node.getBoundingClientRect();
            return box.width > 1 && (box.right > innerWidth + 1 || box.left < -1);
        }).map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    for selector in ("body", ".hint" if view == "Chat" else "#pulse", "nav a:not([aria-current])"):
        front, back = page.evaluate(
            """selector => [
                getComputedStyle(document.querySelector(selector)).color,
                getComputedStyle(document.body).backgroundColor,
            ]""",
            selector,
        )
        assert contrast(front, back) >= 4.5, (selector, front, back)
    is_dark = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.2
    assert is_dark == (scheme == "dark")


def test_everything_is_reached_by_the_keyboard(visit):
    page = visit()
    page.locator("select#model:has-text('fake')").wait_for()
    reached = set()
    for _ in range(26):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            continue  # past the last
        name = page.evaluate(
            "(e => e.getAttribute('aria-label') || e.id || e.textContent)(document.activeElement)"
        )
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring != "none" or name == "Message", f"{name} has the focus and does not show it"
        reached.add(name.strip())
    assert {"Chat", "Dashboard", "New conversation", "Settings", "Message", "Attach files"} <= reached
