"""Settings, presets, token probabilities, plain completion, files, keys."""

import base64
import json
import re
import zlib

import pytest
from playwright.sync_api import expect

from tests.page_driver import answer, answers, ask, said, stream_of


def settings(page):
    page.get_by_role("button", name="Settings").click()
    for title in page.locator(".group:not([open]) > summary").all_inner_texts():
        page.locator(".group > summary", has_text=title).click()


def body_of(page, act):
    with page.expect_request(re.compile("completions$")) as asked:
        act()
    return json.loads(asked.value.post_data)


def test_empty_fields_show_what_holds(visit, server):
    page = visit()
    page.locator("select#model:has-text('fake')").wait_for()
    [card] = server.get("/v1/models").json()["data"]
    page.get_by_role("button", name="Settings").click()
    for name, value in card["default_parameters"].items():
        shown = page.locator(f"[name={name}]").get_attribute("placeholder")
        assert float(shown) == value, name
    expect(page.get_by_label("Seed")).to_have_attribute("placeholder", "random")


VALUES = {
    "presence_penalty": ("0.5", 0.5),
    "min_tokens": ("2", 2),
    "stop": ("one\ntwo", ["one", "two"]),
    "stop_token_ids": ("3, 4", [3, 4]),
    "ignore_eos": ("true", True),
    "bad_words": ("x", ["x"]),
    "logit_bias": ('{"5": 1}', {"5": 1}),
    "skip_special_tokens": ("false", False),
    "chat_template_kwargs": ('{"a": 1}', {"a": 1}),
    "repetition_detection": (
        '{"max_pattern_size": 9, "min_count": 3}',
        {"max_pattern_size": 9, "min_count": 3},
    ),
}


def fill(page, name, text):
    field = page.locator(f"#settings [name={name}]")
    if field.evaluate("field => field.tagName") == "SELECT":
        field.select_option(text)
    else:
        field.fill(text)


def test_all_options_are_sent_as_the_api_has_them(visit):
    page = visit(num_tokens=3)
    settings(page)
    for name, (text, _) in VALUES.items():
        fill(page, name, text)
    fill(page, "json_schema", '{"type": "object"}')
    fill(page, "logprobs", "true")
    fill(page, "extra", '{"priority": 0}')
    page.keyboard.press("Escape")
    body = body_of(page, lambda: ask(page, "hello"))
    for name, (_, value) in VALUES.items():
        assert body[name] == value
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (body["logprobs"], body["top_logprobs"], body["priority"]) == (True, 5, 0)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("json_schema", "{", "An object in JSON"),
        ("tools", "{}", "A list in JSON"),
        ("stop_token_ids", "a", "Whole numbers"),
    ],
)
def test_what_is_no_json_is_marked(visit, name, text, words):
    page = visit()
    settings(page)
    fill(page, name, text)
    expect(page.locator(f"#{name}-fault")).to_contain_text(words)
    page.keyboard.press("Escape")
    ask(page, "hello")
    expect(page.locator(f"[name={name}]")).to_be_focused()
    expect(page.locator("li.user")).to_have_count(0)


@pytest.mark.slow
def test_presets(visit):
    page = visit()
    page.get_by_role("button", name="Settings").click()
    page.locator("#preset").select_option("Creative")
    expect(page.get_by_label("Temperature")).to_have_value("1.2")
    page.get_by_label("Top k").fill("9")
    page.get_by_label("Name").fill("Mine")
    page.get_by_role("button", name="Save").click()
    page.locator("#preset").select_option("Precise")
    expect(page.get_by_label("Top k")).to_have_value("")
    page.reload()
    page.get_by_role("button", name="Settings").click()
    page.locator("#preset").select_option("Mine")
    expect(page.get_by_label("Top k")).to_have_value("9")
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#preset").locator("option")).to_have_count(4)


def chosen(token, logprob, *others):
    top = [{"token": t, "logprob": p, "bytes": None} for t, p in ((token, logprob), *others)]
    return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": top}


def test_probabilities_on_a_click_and_another_token_in_its_place(visit):
    page = visit()
    asked = answers(page, "plain")
    ask(page, "first")
    said(page)
    answer(page).get_by_role("button", name="Token probabilities").click()
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": t}, "logprobs": {"content": [entry]}}]}
        for t, entry in (
            ("Hel", chosen("Hel", -0.05, ("Jel", -3.0))),
            ("lo", chosen("lo", -0.9, ("p", -1.2))),
        )
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + stream_of({})
    page.context.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    sent = body_of(page, page.get_by_role("button", name="Answer again with them").click)
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 5)
    expect(answer(page).locator(".text")).to_have_text("Hello")
    answer(page).get_by_role("button", name="Token probabilities").click()
    expect(page.locator(".token")).to_have_text(["Hel", "lo"])
    page.locator(".token").last.click()
    expect(page.locator(".alternative")).to_have_text(["lo41 %", "p30 %"])
    sent = body_of(page, page.locator(".alternative button").click)
    assert sent["messages"][-1] == {"role": "assistant", "content": "Help"}
    assert sent["continue_final_message"] is True
    expect(answer(page).locator(".branches")).to_have_text("3/3")
    assert len(asked) == 1


@pytest.mark.slow
def test_plain_completion(visit):
    page = visit("/#complete")
    start = page.get_by_label("Text to go on with")
    expect(start).to_be_focused()
    start.fill("Once upon")
    sent = body_of(page, lambda: page.keyboard.press("Control+Enter"))
    assert (sent["prompt"], sent["max_tokens"]) == ("Once upon", 128)
    assert "messages" not in sent
    expect(page.locator("#written-facts")).to_contain_text("token", timeout=10_000)
    expect(page.get_by_role("button", name="Complete")).to_be_enabled(timeout=10_000)
    expect(page.locator("#written .given")).to_have_text("Once upon")
    sent = body_of(page, page.get_by_role("button", name="Go on with it").click)
    assert sent["prompt"].startswith("Once upon")
    assert len(sent["prompt"]) > len("Once upon")


def pdf(*, encrypted=False):
    """A page of text, deflated, in a font of one byte; and a page without any."""
    content = zlib.compress(
        b"BT /F1 12 Tf 72 700 Td (Gr\\374\\337e \\(all\\)) Tj 0 -14 Td [(two)-400(words)] TJ ET"
    )
    return b"".join(
        (
            b"%PDF-1.4\n1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj\n",
            b"2 0 obj <</Type/Pages/Kids[3 0 R 6 0 R]/Count 2/Resources<</Font<</F1 5 0 R>>>>>> endobj\n",
            b"3 0 obj <</Type/Page/Parent 2 0 R/Contents 4 0 R>> endobj\n",
            b"4 0 obj <</Length %d/Filter/FlateDecode>> stream\n%s\nendstream endobj\n"
            % (len(content), content),
            b"5 0 obj <</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>> endobj\n",
            b"6 0 obj <</Type/Page/Parent 2 0 R>> endobj\n",
            b"trailer <</Root 1 0 R%s>>\n%%%%EOF" % (b"/Encrypt 9 0 R" if encrypted else b""),
        )
    )


def attach(page, *files):
    page.locator("#files").set_input_files([{"name": n, "mimeType": t, "buffer": b} for n, t, b in files])


@pytest.mark.slow
def test_texts_and_pdfs_are_told_as_text(visit, browser):
    page = visit(num_tokens=3)
    printed = browser.new_page()
    printed.set_content("<p>Printed in <b>Chromium</b>: naïve π</p>")
    attach(
        page,
        ("notes.txt", "text/plain", "Zürich".encode()),
        ("a.pdf", "application/pdf", pdf()),
        ("b.pdf", "application/pdf", printed.pdf()),
        ("old.csv", "text/csv", "Zürich".encode("latin-1")),
    )
    chips = page.locator("#attached .chip")
    expect(chips).to_have_count(4)
    expect(chips.nth(1)).to_contain_text("1 of 2 pages without text (pictures of it, perhaps): 2")
    page.get_by_role("button", name="Remove old.csv").click()
    body = body_of(page, lambda: ask(page, "What is it?"))
    [message] = body["messages"]
    assert message["content"] == "\n\n".join(
        (
            '<document name="notes.txt">\nZürich\n</document>',
            '<document name="a.pdf">\nGrüße (all)\ntwo words\n</document>',
            '<document name="b.pdf">\nPrinted in Chromium: naïve π\n</document>',
            "What is it?",
        )
    )
    expect(page.locator("li.user .chip")).to_have_count(3)
    page.reload()
    page.locator("li.user .chip summary").first.click()
    expect(page.locator("li.user .chip pre").first).to_have_text("Zürich")


@pytest.mark.parametrize(
    ("name", "kind", "content", "words"),
    [
        ("a.pdf", "application/pdf", pdf(encrypted=True), "is encrypted and cannot be read"),
        ("a.pdf", "application/pdf", b"%PDF-1.4\nnothing", "is damaged"),
        ("a.bin", "application/octet-stream", b"\0\1\2", "is no text"),
        ("a.png", "image/png", b"\x89PNG", "is a picture, which this model does not take"),
    ],
)
def test_what_cannot_be_read_is_said(visit, name, kind, content, words):
    page = visit()
    page.locator("select#model:has-text('fake')").wait_for()
    attach(page, (name, kind, content))
    expect(page.locator("#toast")).to_contain_text(words)
    expect(page.locator("#attached .chip")).to_have_count(0)


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def test_pictures_go_to_a_model_that_takes_them(visit):
    page = visit(num_tokens=3)

    def with_pictures(route):
        card = route.fetch().json()
        card["data"][0]["input_modalities"] = ["text", "image"]
        route.fulfill(json=card)

    page.context.route("**/v1/models", with_pictures)
    page.reload()
    page.locator("select#model:has-text('fake')").wait_for()
    attach(page, ("dot.png", "image/png", PIXEL))
    expect(page.locator("#attached .chip")).to_have_count(1)
    page.context.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=stream_of({"content": "x"})),
    )
    body = body_of(page, lambda: ask(page, "What is it?"))
    picture, text = body["messages"][0]["content"]
    assert picture["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert text == {"type": "text", "text": "What is it?"}
    page.locator("li.user .chip summary").click()
    expect(page.locator("li.user canvas")).to_be_visible()


def test_the_switch_shows_the_states_of_several_models(visit):
    page, states = visit(), ["sleeping"]

    def with_another(route):
        cards = route.fetch().json()
        other = cards["data"][0] | {"id": "other", "status": {"value": states[-1]}}
        route.fulfill(json=cards | {"data": [*cards["data"], other]})

    page.context.route("**/v1/models", with_another)
    page.reload()
    options = page.locator("select#model option")
    expect(options).to_have_text(["fake", "other · sleeping"])
    page.locator("select#model").select_option("other")
    states.append("loaded")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(options).to_have_text(["fake", "other"])
    assert page.locator("select#model").input_value() == "other"


def test_the_keyboard_alone(visit):
    page = visit()
    asked = answers(page, "one", "two")
    page.locator("select#model:has-text('fake')").wait_for()
    page.keyboard.type("first")
    page.keyboard.press("Enter")
    said(page)
    page.keyboard.press("Control+Shift+O")
    expect(page.get_by_role("heading", name="What is on your mind?")).to_be_visible()
    page.keyboard.press("Control+k")
    expect(page.get_by_label("Search the conversations")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(answer(page).locator(".text")).to_have_text("one")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    expect(page.get_by_label("Message")).to_be_focused()
    expect(page.get_by_label("Message")).to_have_value("")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    keys = page.get_by_role("dialog", name="Keys")
    for words in ("New conversation", "Search the conversations", "Stop the answer"):
        expect(keys).to_contain_text(words)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+,")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    shown = page.locator("#sidebar").is_visible()
    page.keyboard.press("Control+b")
    expect(page.locator("#sidebar")).to_be_visible(visible=not shown)
    assert asked == [["first"]]


def test_light_and_dark_are_chosen_and_kept(visit):
    page = visit(color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    button = page.get_by_role("button", name="Colours")
    button.click()
    button.click()
    expect(button).to_have_attribute("title", "Colours: dark")
    dark = page.evaluate(colour)
    assert dark != light
    page.reload()
    assert page.evaluate(colour) == dark
    expect(page.get_by_role("button", name=re.compile("Colours: dark"))).to_be_visible()
