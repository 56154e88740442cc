"""The page of a server whose model makes vectors: it compares texts, and does not offer a chat."""

import pytest
from playwright.sync_api import expect

from tests.served_process import ServeProcess

DOCUMENTS = "Trains run on rails.\nPlants make sugar of light.\nBread is baked hot."


@pytest.fixture(scope="module")
def embedder():
    program = ["-m", "octavo", "serve", "minilm", "--cpu-threads", "1"]
    with ServeProcess(program=program) as server:
        yield server


def test_an_embedding_server_compares_texts(visit, embedder):
    page = visit(url=embedder.url)
    page.get_by_role("heading", name="Compare texts").wait_for()
    expect(page.locator("#model-kind")).to_contain_text("gives each text a vector, texts of up to 256 tokens")
    expect(page.get_by_role("link", name="Chat", exact=True)).to_be_hidden()
    expect(page.locator("#composer")).to_be_hidden()
    compare = page.get_by_role("button", name="Compare")
    expect(compare).to_be_disabled()
    page.get_by_label("Query").fill("What do plants live on?")
    page.get_by_label("Texts, one on each line").fill(DOCUMENTS)
    compare.click()
    rows = page.locator("#ranking li")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text("Plants make sugar of light.")
    scores = [float(text) for text in page.locator("#ranking strong").all_inner_texts()]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[1] + 0.1
    page.goto(f"{embedder.url}/#chat")
    expect(page.get_by_role("heading", name="Compare texts")).to_be_visible()
    assert not [url for url in page.asked if "completions" in url]


def test_a_generating_server_does_not_offer_it(visit):
    page = visit("/#compare")
    page.locator("select#model:has-text('fake')").wait_for()
    expect(page.get_by_role("link", name="Compare")).to_be_hidden()
    expect(page.locator("#composer")).to_be_visible()
