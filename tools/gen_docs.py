"""Writes the pages of docs/ that are made from the code: `python tools/gen_docs.py`. A test checks them.

Some pages are written by hand, but for the parts between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import dataclasses
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, from any folder

from octavo.base import env  # noqa: E402
from octavo.config.args import EngineArgs  # noqa: E402
from octavo.config.foreign import ALIASES, ENGINE, SERVER, SERVER_ALIASES  # noqa: E402
from octavo.config.option import TARGET  # noqa: E402
from octavo.config.server import ServerConfig  # noqa: E402
from octavo.metrics.names import ALIASES as METRIC_ALIASES  # noqa: E402
from octavo.metrics.names import METRICS  # noqa: E402
from tools.gen_models import block_types, built_in, families  # noqa: E402
from tools.gen_reference import NOTE, commands, http_page, python_page, table  # noqa: E402

_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PARTS = {"commands": commands, "built-in": built_in, "families": families, "block-types": block_types}


def config_page() -> str:
    """Every option by concern, and vLLM's that octavo has not."""
    parts = [
        "# Options",
        NOTE,
        "Every option has one name: `max_num_seqs` is a keyword of `LLM`, a field of `EngineArgs` and a key "
        "of a `--config` file, and `--max-num-seqs` is its flag. Values that you leave open are chosen at "
        "the start, and logged. The options of `ServerConfig` are for `octavo serve` only.",
    ]
    for concern in (*EngineArgs.__mro__[1:-1], ServerConfig):
        fields = dataclasses.fields(concern)
        parts.append(f"## {concern.__name__}\n\n{concern.__doc__}")
        parts.append(table(("option", "type", "default", "meaning"), [_option(field) for field in fields]))
    parts.append(
        "## Options of vLLM that octavo has not\n\nThey may be given: a value that asks for nothing passes, "
        "another is dropped with a line in the log, or refused."
    )
    foreign = [
        (f"`{name}`", "refused" if row.is_refused else "no effect", row.text)
        for name, row in sorted((ENGINE | SERVER).items())
    ]
    names = sorted((ALIASES | SERVER_ALIASES).items())
    aliases = [(f"`{name}`", "", f"Another name of `{alias.own}`.") for name, alias in names]
    parts.append(table(("option", "", "why"), aliases + foreign))
    parts.append("## Environment variables\n\nThe first of a row wins; what an option says wins over all.")
    parts.append(table(("variable", "meaning"), _variables()))
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Every metric."""
    rows = [
        (
            f"`{row.prefix}{name}`",
            row.kind.__name__.lower(),
            ", ".join(f"`{label}`" if label != "…" else label for label in row.labels),
            row.explain,
            ", ".join(f"{bound:g}" for bound in row.buckets),
        )
        for name, row in METRICS.items()
    ]
    aliases = ", ".join(f"`{alias}` (`{name}`)" for alias, name in METRIC_ALIASES.items())
    parts = [
        "# Metrics",
        NOTE,
        "`LLM.get_metrics()`, `LLMEngine.get_metrics()` and `await AsyncLLM.get_metrics()` return them as "
        "objects with `name`, `labels` and `value` (counter, gauge) or `count`, `sum` and `buckets` "
        "(histogram). All but those of HTTP have the labels `model_name` and `engine`. A series appears once "
        "it has something to say. A request with `n` > 1 counts as one. Times are of the monotonic clock.",
        "A server shows them at `/metrics` for Prometheus, where counters end in `_total`; `--metric-names` "
        "chooses the prefix: `vllm` (as here), `octavo`, `both`. With several front processes every one of "
        "them shows the sum. The machine's own figures and those of HTTP are there only. Dashboards may also "
        f"ask for {aliases}. [Monitoring](guides/monitoring.md) sets up Prometheus and Grafana.",
        table(("name", "kind", "own labels", "meaning", "buckets"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def filled(name: str) -> str:
    """A page written by hand, with its generated parts as the code says now."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return _PART.sub(lambda found: f"{found[1]}{PARTS[found[2]]()}\n{found[3]}", text)


PAGES = {
    "docs/config.md": config_page,
    "docs/metrics.md": metrics_page,
    "docs/reference/http.md": http_page,
    "docs/reference/python.md": python_page,
    **{name: partial(filled, name) for name in ("docs/cli.md", "docs/models.md", "docs/guides/quantized.md")},
}


def _variables() -> list[tuple[str, ...]]:
    """As the functions of base/env.py explain them: lines of the form NAME: meaning."""
    functions = [f for name, f in vars(env).items() if inspect.isfunction(f) and not name.startswith("_")]
    lines = [line for function in functions for line in (inspect.getdoc(function) or "").splitlines()]
    matches = [re.fullmatch(r"([A-Z][A-Z_]{2,}[^:]*): (.+)", line) for line in lines]
    return [match.groups() for match in matches if match]


def _option(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    kind = get_origin(field.type) or field.type
    default = {} if field.default is dataclasses.MISSING else field.default
    choices = [f"`{choice}`" for choice in field.metadata["choices"] if choice not in ("", TARGET)]
    allowed = f" One of {', '.join(choices)}." if choices else ""
    shown = "" if default in ("", {}) else f"`{default}`"
    return (f"`{field.name}`", kind.__name__, shown, field.metadata["explain"] + allowed)


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
