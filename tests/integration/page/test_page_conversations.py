"""Conversations that the browser keeps: reload, branches, undo, export and import, links, hostile files."""

import json
import re

import pytest
from playwright.sync_api import expect

from tests.page_driver import answer, answers, ask, hear, said


def listed(page):
    return page.locator("#conversations a").all_inner_texts()


def menu(page, title, entry):
    row = page.locator("#conversations li", has=page.get_by_role("link", name=title, exact=True))
    row.hover()
    row.get_by_role("button").click()
    page.get_by_role("menuitem", name=entry).click()


def saved(page, act):
    with page.expect_download() as download:
        act()
    return download.value.path().read_text(encoding="utf-8"), download.value.suggested_filename


def bring_in(page, name, text):
    page.locator("#import-file").set_input_files({"name": name, "mimeType": "", "buffer": text.encode()})


def talk(page, *texts):
    for text in texts:
        hear(page, text)


def test_a_reload_keeps_the_conversation(visit):
    page = visit()
    answers(page, "**one**", "two")
    talk(page, "first", "second")
    page.reload()
    expect(answer(page).locator(".text")).to_have_text("two")
    assert said(page) == ["first", "one", "second", "two"]
    expect(page.locator("li.assistant strong")).to_have_text("one")
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("heading", name="What is on your mind?")).to_be_visible()
    page.get_by_role("link", name="first").click()
    assert said(page) == ["first", "one", "second", "two"]


@pytest.mark.slow
def test_an_answer_that_was_coming_is_kept_as_far_as_it_came(visit):
    page = visit(num_tokens=2000, may_complain=True)
    ask(page, "a long one")
    expect(page.locator("#conversations a")).to_have_count(1, timeout=10_000)
    page.wait_for_timeout(2500)
    page.reload()
    expect(answer(page).locator(".facts")).to_contain_text("was cut off")
    assert len(answer(page).locator(".text").inner_text()) > 5


def test_branches(visit):
    page = visit()
    asked = answers(page, "one", "two", "uno", "another", "more", "zwei")
    talk(page, "first", "second")
    page.locator("li.assistant").first.hover()
    page.get_by_role("button", name="Answer again").first.click()
    expect(page.locator("li.assistant .text")).to_have_text(["uno"])
    expect(page.locator(".branches").nth(1)).to_have_text("2/2")
    page.get_by_role("button", name="Branch before").click()
    assert said(page) == ["first", "one", "second", "two"]
    page.locator("li.user").last.hover()
    page.get_by_role("button", name="Edit this question").last.click()
    page.get_by_label("Question", exact=True).fill("deuxième")
    page.keyboard.press("Enter")
    expect(answer(page).locator(".text")).to_have_text("another")
    assert said(page) == ["first", "one", "deuxième", "another"]
    page.reload()
    expect(answer(page).locator(".text")).to_have_text("another")
    page.get_by_role("button", name="Branch before").last.click()
    assert said(page) == ["first", "one", "second", "two"]
    page.get_by_role("button", name="Branch after").last.click()
    talk(page, "third")
    assert asked[2] == ["first"]
    assert asked[-2:] == [["first", "one", "deuxième"], ["first", "one", "deuxième", "another", "third"]]


def test_an_answer_goes_on_and_can_be_rewritten(visit):
    page = visit()
    asked = answers(page, "one and", " two", "three")
    talk(page, "first")
    page.get_by_role("button", name="Continue this answer").click()
    expect(answer(page).locator(".text")).to_have_text("one and two")
    assert asked[1] == ["first", "one and"]
    page.get_by_role("button", name="Edit this answer").click()
    page.get_by_label("Answer", exact=True).fill("my own words")
    page.get_by_role("button", name="Save").click()
    assert said(page) == ["first", "my own words"]
    expect(answer(page).locator(".branches")).to_have_text("2/2")
    talk(page, "next")
    assert asked[2] == ["first", "my own words", "next"]


def test_what_goes_on_is_asked_for_as_the_api_has_it(visit):
    page = visit(num_tokens=4)
    talk(page, "first")
    expect(answer(page).locator(".facts")).to_contain_text("4 tokens")
    page.evaluate("document.querySelector('li.assistant .text').textContent")
    page.get_by_role("button", name="Edit this answer").click()
    page.get_by_label("Answer", exact=True).fill("beginning")
    page.get_by_role("button", name="Save").click()
    with page.expect_request("**/v1/chat/completions") as request:
        page.get_by_role("button", name="Continue this answer").click()
    body = json.loads(request.value.post_data)
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    expect(answer(page).locator(".facts")).to_contain_text("4 tokens")
    expect(answer(page).locator(".text")).to_contain_text("beginning")


@pytest.mark.slow
def test_turns_left_out_are_not_told(visit):
    page = visit()
    asked = answers(page, "one", "two", "three", "four")
    talk(page, "first", "second")
    page.locator("li.user").first.hover()
    page.get_by_role("button", name="Leave this turn out of the context").first.click()
    talk(page, "third")
    assert asked[-1] == ["second", "two", "third"]
    expect(page.locator("li.left-out")).to_have_count(2)
    page.locator("li.user").first.hover()
    page.get_by_role("button", name="Tell this turn to the model again").click()
    talk(page, "fourth")
    assert asked[-1] == ["first", "one", "second", "two", "third", "three", "fourth"]


def test_a_context_that_became_full_says_so(visit):
    page = visit(num_tokens=None)
    ask(page, "hello " * 640)
    expect(page.get_by_role("alert")).to_contain_text("The context is full", timeout=30_000)
    expect(page.locator("#context")).to_have_text(re.compile("100 % of the context"))


@pytest.mark.slow
def test_rename_search_delete_and_undo(visit):
    page = visit()
    answers(page, "about whales", "about sparrows", "x")
    for text in ("seas", "skies"):
        talk(page, text)
        page.get_by_role("button", name="New conversation").click()
    assert listed(page) == ["skies", "seas"]
    menu(page, "seas", "Rename")
    page.keyboard.type("oceans")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations a")).to_have_text(["skies", "oceans"])
    search = page.get_by_label("Search the conversations")
    search.fill("WHALES")
    expect(page.locator("#conversations a")).to_have_text(["oceans"])
    search.fill("nothing such")
    expect(page.locator("#no-conversations")).to_have_text("Nothing is found.")
    search.fill("")
    expect(page.locator("#conversations a")).to_have_count(2)
    menu(page, "oceans", "Delete")
    expect(page.locator("#conversations a")).to_have_text(["skies"])
    page.reload()
    expect(page.locator("#conversations a")).to_have_text(["skies"])
    menu(page, "skies", "Delete")
    expect(page.locator("#conversations a")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#conversations a")).to_have_text(["skies"])
    page.get_by_role("link", name="skies").click()
    assert said(page) == ["skies", "about sparrows"]


@pytest.mark.slow
def test_a_removed_turn_comes_back(visit):
    page = visit()
    answers(page, "one", "two")
    talk(page, "first", "second")
    page.locator("li.user").first.hover()
    page.get_by_role("button", name="Remove this turn").first.click()
    assert said(page) == ["second", "two"]
    page.get_by_role("button", name="Undo").click()
    assert said(page) == ["first", "one", "second", "two"]


TRICKY = "a\n\n<!-- octavo: user -->\n## Question\n\nb\n\\<!-- octavo: x\n\n"


def test_export_and_import_as_json_keep_everything(visit):
    page = visit()
    answers(page, "one", "two", "uno")
    talk(page, "first", "second")
    page.get_by_role("button", name="Answer again").last.click()
    said(page)
    text, name = saved(page, lambda: menu(page, "first", "Export as JSON"))
    assert name == "first.json"
    before = json.loads(text)["conversations"]
    other = visit()
    bring_in(other, name, text)
    expect(other.locator("#conversations a")).to_have_text(["first"])
    expect(answer(other).locator(".branches")).to_have_text("2/2")
    assert said(other) == ["first", "one", "second", "uno"]
    again, _ = saved(other, lambda: other.get_by_role("button", name="Export all").click())

    def shape(chats):
        ids = {None: None} | {turn["id"]: n for chat in chats for n, turn in enumerate(chat["turns"])}
        turns = [
            [{**turn, "id": ids[turn["id"]], "parent": ids[turn["parent"]]} for turn in chat["turns"]]
            for chat in chats
        ]
        heads = [ids[chat["head"]] for chat in chats]
        return json.loads(json.dumps([turns, heads]).replace(', "finish": ""', ""))

    assert shape(json.loads(again)["conversations"]) == shape(before)


def test_export_and_import_as_markdown_keep_the_shown_branch(visit):
    page = visit()
    answers(page, TRICKY + "c", "two")
    talk(page, "first", "second")
    text, name = saved(page, lambda: menu(page, "first", "Export as Markdown"))
    assert name == "first.md"
    other = visit()
    bring_in(other, name, text)
    expect(other.locator("#conversations a")).to_have_text(["first"])
    back, _ = saved(other, lambda: menu(other, "first", "Export as JSON"))
    turns = [turn["text"] for turn in json.loads(back)["conversations"][0]["turns"]]
    assert turns == ["first", TRICKY + "c", "second", "two"]


PICTURE = "data:image/png;base64,iVBORw0KGgo="
TREE = [
    {
        "id": 1,
        "parent": None,
        "role": "user",
        "text": "first",
        "files": [{"name": "a ä-->.md", "text": TRICKY}],
    },
    {"id": 2, "parent": 1, "role": "assistant", "text": "one"},
    {"id": 3, "parent": 1, "role": "assistant", "text": "uno"},
    {
        "id": 4,
        "parent": 2,
        "role": "user",
        "text": "",
        "files": [{"name": "p.png", "text": "", "image": PICTURE}],
    },
    {"id": 5, "parent": 4, "role": "assistant", "text": "two\n\n```\ncode\n```"},
    {"id": 6, "parent": None, "role": "user", "text": "another"},
]


@pytest.mark.slow
def test_markdown_keeps_files_and_branches(visit):
    page = visit()
    bring_in(page, "a.json", json.dumps({"title": "All", "turns": TREE, "head": 5}))
    expect(page.locator("#conversations a")).to_have_text(["All"])
    text, _ = saved(page, lambda: menu(page, "All", "Export as Markdown"))
    assert (
        text.index("two")
        < text.index("## Answer, another branch after turn 1")
        < text.index("another beginning")
    )
    other = visit()
    bring_in(other, "a.md", text)
    back, _ = saved(other, lambda: menu(other, "All", "Export as JSON"))
    [chat] = json.loads(back)["conversations"]
    turns = {turn["id"]: turn for turn in chat["turns"]}

    def line(turn):
        """A turn as what leads to it, whatever its id."""
        files = [(file["name"], file["text"], file.get("image")) for file in turn.get("files", [])]
        before = turns.get(turn["parent"])
        return (turn["role"], turn["text"], files, before and line(before))

    found = [line(turn) for turn in turns.values()]
    shown = line(turns[chat["head"]])
    turns = {turn["id"]: turn for turn in TREE}
    assert sorted(map(repr, found)) == sorted(repr(line(turn)) for turn in TREE)
    assert shown == line(turns[5])


@pytest.mark.slow
def test_a_link_holds_the_conversation_and_tells_no_server(visit, server):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    answers(page, "one")
    talk(page, "first")
    menu(page, "first", "Copy a link that holds it")
    expect(page.locator("#toast")).to_contain_text("nothing was uploaded")
    link = page.evaluate("navigator.clipboard.readText()")
    other = visit("/" + link.removeprefix(server.url + "/"))
    dialog = other.get_by_role("dialog")
    expect(dialog).to_contain_text("“first”, 2 turns")
    dialog.get_by_role("button", name="Keep and open it").click()
    expect(answer(other).locator(".text")).to_have_text("one")
    assert said(other) == ["first", "one"]
    assert not [url for url in other.asked if "shared/" in url.split("#")[0]]


HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
BAD = [
    ("a.json", "[1, 2", "is not JSON"),
    ("a.json", "{}", "holds no conversation"),
    ("a.json", '{"conversations": []}', "holds no conversations"),
    ("a.json", '{"turns": [{"role": "system", "text": "x"}]}', "holds no turns"),
    (
        "a.json",
        '{"turns": [{"id": 1, "parent": 2, "role": "user", "text": "x"}]}',
        "before the one it follows",
    ),
    ("a.md", "# just a text", "neither JSON nor Markdown"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD, ids=[words for _, _, words in BAD])
def test_files_that_are_none(visit, name, text, words):
    page = visit()
    bring_in(page, name, text)
    expect(page.locator("#toast")).to_contain_text(words)
    assert listed(page) == []


def test_a_hostile_file_runs_nothing_and_brings_in_nothing_else(visit):
    page = visit()
    turn = {
        "id": "a",
        "parent": None,
        "role": "user",
        "text": HOSTILE,
        "onclick": "x",
        "files": [{"name": HOSTILE, "text": HOSTILE, "image": "javascript:window.hit=1"}, None, 3],
    }
    reply = {
        "id": "__proto__",
        "parent": "a",
        "role": "assistant",
        "text": f"[x](javascript:window.hit=1) {HOSTILE}",
        "reasoning": HOSTILE,
        "fault": HOSTILE,
        "finish": HOSTILE,
        "calls": [{"name": HOSTILE, "given": HOSTILE}, 5],
        "tokens": [[HOSTILE, "x", [[HOSTILE, {}]]], 7],
        "facts": {"speed": HOSTILE, "tokens": 3},
    }
    chat = {"id": '"><b>', "title": HOSTILE, "created": "x", "head": "__proto__", "turns": [turn, reply]}
    bring_in(page, "a.json", json.dumps({"conversations": [chat]}))
    expect(answer(page).locator(".text")).to_contain_text("onerror")
    page.get_by_role("button", name="Token probabilities").click()
    page.locator(".token").first.click()
    page.keyboard.press("Escape")
    page.reload()
    expect(answer(page).locator(".text")).to_contain_text("onerror")
    assert page.evaluate("window.hit") is None
    assert (
        page.evaluate(
            "document.querySelectorAll('main img, main script, [onclick], a[href^=javascript]').length"
        )
        == 0
    )
    text, _ = saved(page, lambda: page.get_by_role("button", name="Export all").click())
    [kept] = json.loads(text)["conversations"]
    assert set(kept) == {"id", "title", "created", "changed", "head", "turns"}
    assert "onclick" not in kept["turns"][0]
    assert kept["turns"][0]["files"][0]["name"] == HOSTILE
    assert "image" not in kept["turns"][0]["files"][0]
