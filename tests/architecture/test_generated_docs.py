"""Pages that are written from the code are up to date."""

import dataclasses

import pytest

from octavo.config import EngineArgs
from tools.gen_docs import PAGES, ROOT, config_page


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_page_is_what_the_code_says(page):
    written = (ROOT / page).read_text(encoding="utf-8")
    assert written == PAGES[page](), "run python tools/gen_docs.py"


def test_every_option_has_its_row():
    text = config_page()
    for field in dataclasses.fields(EngineArgs):
        assert text.count(f"| `{field.name}` |") == 1, field.name
