"""Every view in light and dark, wide and on a phone: no finding of axe, nothing cut off, and soon there."""

import json
from importlib.resources import files

import pytest
from playwright.sync_api import expect

from tests.page_driver import answer

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
RICH = """## A *title*

Text with `code`, a [link](https://a.example/), $\\frac{a}{b}$ and a note[^1].

- [x] done
- [ ] to do

| a | b |
|---|--:|
| 1 | 2 |

$$\\sum_{n=1}^{N} x_n$$

```python
def f(x):  # a comment
    return "text", 12
```

> A quotation.

[^1]: The note.
"""
FILE = {"name": "a.txt", "text": "text"}
CHAT = [
    {"id": 1, "parent": None, "role": "user", "text": "A question", "files": [FILE], "isOut": True},
    {"id": 2, "parent": 1, "role": "assistant", "text": RICH, "reasoning": "Well …"},
    {
        "id": 3,
        "parent": 1,
        "role": "assistant",
        "text": RICH,
        "facts": {"speed": 41.5, "firstMs": 80, "tokens": 300},
    },
    {"id": 4, "parent": 3, "role": "user", "text": "Another"},
    {
        "id": 5,
        "parent": 4,
        "role": "assistant",
        "text": "ab",
        "tokens": [["a", -0.1, [["c", -3]]], ["b", -4, []]],
    },
    {"id": 6, "parent": 5, "role": "user", "text": "The last"},
    {
        "id": 7,
        "parent": 6,
        "role": "assistant",
        "text": "",
        "fault": "It failed.",
        "finish": "error",
        "calls": [{"name": "weather", "given": "{}"}],
    },
]


def bring_in(page):
    content = json.dumps({"turns": CHAT, "title": "A rich one"}).encode()
    page.locator("#import-file").set_input_files({"name": "a.json", "mimeType": "", "buffer": content})
    expect(page.get_by_role("alert")).to_be_visible()


def look(page, view):
    """Open a view; returns how to leave it."""
    match view:
        case "rich chat":
            bring_in(page)
            page.locator("#toast").evaluate("toast => toast.replaceChildren()")
        case "tokens":
            bring_in(page)
            page.locator("li.assistant").nth(1).hover()
            page.get_by_role("button", name="Token probabilities").nth(1).click()
            page.locator(".token").first.click()
        case "settings":
            page.get_by_role("button", name="Settings").click()
            page.evaluate("for (const group of document.querySelectorAll('.group')) group.open = true")
        case "keys":
            page.keyboard.press("Escape")
            page.evaluate("document.activeElement.blur()")
            page.keyboard.press("?")
            expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        case "list and menu":
            bring_in(page)
            if page.locator("#sidebar").is_hidden():
                page.get_by_role("button", name="Conversations", exact=True).click()
            page.locator("#conversations li button").first.click()
            expect(page.get_by_role("menu")).to_be_visible()
        case "complete":
            page.get_by_role("link", name="Complete").click()
        case "dashboard":
            page.get_by_role("link", name="Dashboard").click()
            expect(page.locator("#pulse")).to_contain_text("Live")
        case "api":
            expect(page.get_by_role("heading", name="OpenAI", exact=True)).to_be_visible()


VIEWS = [
    "welcome",
    "rich chat",
    "tokens",
    "settings",
    "keys",
    "list and menu",
    "complete",
    "dashboard",
    "api",
]


COLOURS = ["color-contrast", "link-in-text-block"]
"""The rules whose answer depends on colours: the dark page has the same nodes as the light one."""


def judge(page, rules=None):
    """What axe finds, by rule."""
    page.evaluate(AXE)
    chosen = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    found = page.evaluate("chosen => axe.run(document, chosen).then(({violations}) => violations)", chosen)
    return {rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in found}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(visit, width, view):
    page = visit(
        "/docs" if view == "api" else "/",
        viewport={"width": width, "height": 844},
        color_scheme="light",
        reduced_motion="reduce",
        is_mobile=width < 500,
        has_touch=width < 500,
    )
    if view != "api":
        page.locator("select#model:has-text('fake')").wait_for()
    look(page, view)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert judge(page) == {}
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert judge(page, COLOURS) == {}


def test_axe_finds_what_is_wrong(visit):
    page = visit()
    page.evaluate("document.getElementById('send').removeAttribute('aria-label')")
    page.evaluate("document.getElementById('send').removeAttribute('title')")
    assert "button-name" in judge(page)


def test_axe_finds_colours_that_are_too_close(visit):
    page = visit(color_scheme="dark")
    page.evaluate("for (const node of document.querySelectorAll('#welcome *')) node.style.color = '#444'")
    assert "color-contrast" in judge(page, COLOURS)


def test_it_is_soon_there(visit):
    visit().context.close()  # the browser is warm
    times = []
    for _ in range(3):
        page = visit()
        page.locator("select#model:has-text('fake')").wait_for()
        times.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        page.context.close()
    assert min(times) < 500, "ms to the first paint"


def test_nothing_moves_where_motion_is_unwanted(visit):
    page = visit(reduced_motion="reduce")
    bring_in(page)
    moving = page.evaluate("document.getAnimations().length")
    assert moving == 0
    assert answer(page).is_visible()
