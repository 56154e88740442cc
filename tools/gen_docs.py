"""Writes docs/config.md and docs/metrics.md from the code: `python tools/gen_docs.py`. A test checks them."""

import dataclasses
import inspect
import re
import sys
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

_NOTE = "<!-- Written by tools/gen_docs.py; change the code, not this page. -->"


def config_page() -> str:
    """Every option by concern, and vLLM's that octavo has not."""
    parts = [
        "# Options",
        _NOTE,
        "A field of `EngineArgs`, a keyword of `LLM`, a flag of the command line (`--max-num-seqs`) and a "
        "key of a `--config` file are the same thing under the same name. `resolve` decides what is left "
        "open, once, and logs it. Each field is declared in its concern's class in `octavo/config/`. Those "
        "of `ServerConfig` are options of `octavo serve` alone.",
    ]
    for concern in (*EngineArgs.__mro__[1:-1], ServerConfig):
        fields = dataclasses.fields(concern)
        parts.append(f"## {concern.__name__}\n\n{concern.__doc__}")
        parts.append(_table(("option", "type", "default", "meaning"), [_option(field) for field in fields]))
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
    parts.append(_table(("option", "", "why"), aliases + foreign))
    parts.append("## Environment variables\n\nThe first of a row wins; what an option says wins over all.")
    parts.append(_table(("variable", "meaning"), _variables()))
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
        _NOTE,
        "`LLM.get_metrics()`, `LLMEngine.get_metrics()` and `await AsyncLLM.get_metrics()` return them as "
        "objects with `name`, `labels` and `value` (counter, gauge) or `count`, `sum` and `buckets` "
        "(histogram). All but those of HTTP have the labels `model_name` and `engine`. A series appears once "
        "it has something to say. A request with `n` > 1 counts as one. Times are of the monotonic clock.",
        "A server shows them at `/metrics` for Prometheus, where counters end in `_total`; `--metric-names` "
        "chooses the prefix: `vllm` (as here), `octavo`, `both`. With several front processes every one of "
        "them shows the sum. The machine's own figures and those of HTTP are there only. Dashboards may also "
        f"ask for {aliases}. `deploy/monitoring` has a configuration of Prometheus and a Grafana dashboard.",
        _table(("name", "kind", "own labels", "meaning", "buckets"), rows),
    ]
    return "\n\n".join(parts) + "\n"


PAGES = {"docs/config.md": config_page, "docs/metrics.md": metrics_page}


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


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    """Write the pages."""
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
