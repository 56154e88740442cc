"""Hooks of mkdocs (mkdocs.yml names this file): files of the repository outside docs/, and llms.txt.

A page may link to a file of the repository as it would on a code host: the file becomes a part of the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("*.md", "LICENSE", "examples/**/*.*", "deploy/**/*")
"""Files that pages may link to besides those in docs/, which come first."""
_LINK = re.compile(r"(!?\[[^\]\n]*\])\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            if path.is_file() and uri != "README.md" and files.get_file_from_path(uri) is None:
                file = File(uri, str(ROOT), config.site_dir, config.use_directory_urls)
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between files of the site."""
    parts = _FENCE.split(markdown)
    parts[::2] = [
        _LINK.sub(lambda found: _site_link(page.file.src_uri, *found.groups()), p) for p in parts[::2]
    ]
    return "".join(parts)


def on_post_build(config: Any) -> None:
    """Write llms.txt, llms-full.txt and the Markdown of every page of the navigation."""
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    whole = []
    for heading, pages in _sections(config.nav):
        lines += ["", f"## {heading}", ""]
        for title, uri in pages:
            text = _source(uri).read_text(encoding="utf-8")
            (site / uri).parent.mkdir(parents=True, exist_ok=True)
            (site / uri).write_text(text, encoding="utf-8")
            lines.append(f"- [{title}]({uri}): {summary(text)}")
            whole.append(f"<!-- {uri} -->\n{text}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")


def summary(text: str) -> str:
    """Return the first sentence of a page's first paragraph, without marks."""
    paragraphs = (part.strip() for part in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).split("\n\n"))
    first = next((part for part in paragraphs if part and not part.startswith(("#", "|", "!", "```"))), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split())).replace("**", "")
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", plain)[0]


def _sections(nav: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return headings with their pages as (title, uri); lone pages come first."""
    alone, sections = [], []
    for entry in nav:
        for title, value in entry.items():
            if isinstance(value, str):
                alone.append((title, value))
            else:
                sections.append((title, [pair for page in value for pair in page.items()]))
    return [("Pages", alone), *sections]


def _source(uri: str) -> Path:
    inside = ROOT / "docs" / uri
    return inside if inside.exists() else ROOT / uri


def _site_link(page_uri: str, label: str, target: str, anchor: str | None) -> str:
    """The link as mkdocs understands it; a folder without a page of its own keeps its label only."""
    page = _source(page_uri).relative_to(ROOT).as_posix()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if (ROOT / path).is_dir():
        path += "/README.md"
        if not (ROOT / path).exists():
            return label.strip("[]")
    uri = "index.md" if path == "README.md" else path.removeprefix("docs/")
    return f"{label}({posixpath.relpath(uri, posixpath.dirname(page_uri) or '.')}{anchor or ''})"
