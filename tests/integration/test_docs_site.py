"""The documentation's site, built as `make docs` builds it: nothing from elsewhere, every page, llms.txt."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="make setup brings mkdocs")
from mkdocs.commands.build import build
from mkdocs.config import load_config

from tests.docs_pages import PAGES, ROOT, read
from tools.docs_site import on_page_markdown, summary

LOADING = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


class Loaded(HTMLParser):
    """What a page makes a browser ask for."""

    def __init__(self, text):
        super().__init__()
        self.urls = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.urls += [value or "" for name, value in attrs if (tag, name) in LOADING]


def outside(urls):
    return [url for url in urls if re.match(r"(\w+:)?//", url)]


def test_no_page_asks_another_host(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert outside(Loaded(page.read_text(encoding="utf-8")).urls) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet
    assert outside(Loaded('<script src="https://unpkg.com/a.js"></script><img src="//a/b.png">').urls)


def test_llms_txt_lists_every_page_as_markdown(site):
    listed = re.findall(
        r"^- \[.+\]\((.+)\): .+", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    written = {page.removeprefix("docs/") for page in PAGES} - {"README.md"}
    assert set(listed) == written
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    for uri in listed:
        source = read(f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri)
        assert (site / uri).read_text(encoding="utf-8") == source
        assert source in whole


def test_files_outside_docs_are_part_of_the_site(site):
    assert (site / "examples" / "basic.py").read_bytes() == (ROOT / "examples" / "basic.py").read_bytes()
    assert 'href="../examples/index.html"' in (site / "guides" / "offline.html").read_text(encoding="utf-8")


def test_a_broken_link_is_an_error():
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert config.strict
    assert {*vars(config.validation.links)["data"].values()} == {30}, "warnings, which strict makes errors"


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("start.md", "[a](../examples/README.md)", "[a](examples/README.md)"),
        ("guides/serve.md", "[a](../server.md#bounds)", "[a](../server.md#bounds)"),
        ("guides/serve.md", "[a](../../SECURITY.md)", "[a](../SECURITY.md)"),
        ("CHANGELOG.md", "[a](docs/release-notes.md)", "[a](release-notes.md)"),
        ("guides/serve.md", "[a](https://a.b/c)", "[a](https://a.b/c)"),
        ("start.md", "[a](../tests)", "a"),
        ("start.md", "```\n[a](../tests)\n```", "```\n[a](../tests)\n```"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(page, link, expected):
    assert on_page_markdown(link, SimpleNamespace(file=SimpleNamespace(src_uri=page))) == expected


def test_a_summary_is_the_first_sentence():
    assert summary("# A\n\n<!-- b -->\n\nC is [d](e.md), **f**. G.\n") == "C is d, f."
