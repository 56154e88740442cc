"""Servers whose model is a fake, one with a key and one without, and a browser in front of them."""

import json

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.page_driver import CHROMIUM, KEY
from tests.served_process import ServeProcess


@pytest.fixture(scope="session")
def servers():
    """One without keys and one with; they start side by side."""
    with (
        ServeProcess(orders={"step_s": 0.01}, wait=False) as server,
        ServeProcess("--api-key", KEY, wait=False) as locked,
    ):
        yield server, locked


@pytest.fixture(scope="session")
def server(servers):
    servers[0].wait_for_status(200)
    return servers[0]


@pytest.fixture(scope="module")
def browser():
    """Ends with its module: while Playwright runs, no other test of the process can run an event loop."""
    expect.set_options(timeout=30_000)
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, server):
    """Opens the page; answers have as many tokens as asked for. Nothing may go wrong in the console."""
    contexts, faults = [], []

    def visit(path="/", *, url=server.url, num_tokens=60, may_complain=False, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        context.route(
            "**/v1/chat/completions", lambda route: route.continue_(post_data=_longer(route, num_tokens))
        )
        page = context.new_page()
        page.asked = []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        if not may_complain:
            page.on("console", lambda message: faults.append(message.text))
        page.goto(url + path)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert faults == []


def _longer(route, num_tokens):
    body = json.loads(route.request.post_data)
    return json.dumps({"max_tokens": num_tokens, "ignore_eos": True} | body)


@pytest.fixture(scope="module")
def blank(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    yield page
    page.close()
