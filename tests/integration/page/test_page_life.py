"""The page beside a server that dies and comes back."""

import re

import pytest
from playwright.sync_api import expect

from tests import served_process
from tests.page_driver import answer, ask
from tests.served_process import ServeProcess


@pytest.mark.slow
def test_a_server_that_was_killed_and_is_back(visit, monkeypatch):
    with ServeProcess(orders={"step_s": 0.01}) as first:
        page = visit(url=first.url, num_tokens=2000, may_complain=True)
        monkeypatch.setattr(served_process, "free_port", lambda: first.port)
        ask(page, "a long one")
        expect(answer(page).locator(".facts")).to_contain_text("tokens/s")
        page.get_by_role("link", name="Dashboard").click()
        page.wait_for_timeout(2200)
    expect(page.locator("#server-state")).to_have_text("no server", timeout=10_000)
    expect(page.locator("#pulse")).to_contain_text("The last reading is of")
    drawn = page.locator("path.line-0").first.get_attribute("d")
    assert drawn.count("L") >= 1, "the readings are kept"
    page.get_by_role("link", name="Chat", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    assert len(answer(page).locator(".text").inner_text()) > 5
    with ServeProcess(orders={"step_s": 0}):
        expect(page.locator("#server-state")).to_have_text("ready", timeout=15_000)
        expect(page.locator("#model")).to_have_value("fake")
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_role("alert")).to_have_count(0)
        page.get_by_role("link", name="Dashboard").click()
        expect(page.locator("#pulse")).to_contain_text("Live")
        page.reload()
        expect(page.get_by_role("link", name="a long one")).to_be_visible()


def test_the_time_under_the_pointer(visit):
    page = visit("/#dashboard")
    expect(page.locator("#pulse")).to_contain_text("Live")
    page.wait_for_timeout(2500)
    plot = page.locator(".plot svg").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 20)
    expect(page.locator(".axis .pointed").first).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    page.mouse.move(5, 5)
    expect(page.locator(".axis").first).to_contain_text("now")
