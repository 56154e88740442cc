"""`SANDBOX`: the Jinja environment that chat templates run in, here or in the process that this module is.

Used by `chat_template`; `template_process` starts `python -m octavo.frontend.text.sandbox`. A template comes
from a model file, so it is untrusted: Jinja's immutable sandbox keeps it from everything but its data, and
the process, which a signal ends, from taking time and memory without end. What templates may use beside
Jinja itself follows transformers: raise_exception, strftime_now, tojson, break/continue, {% generation %}.
"""

import json
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from octavo.base.limits import limit_memory

_MEMORY_BYTES = 2**29
_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, SyntaxError, RecursionError)


class RenderError(Exception):
    """Why a template writes nothing."""


def rendered(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    """Return what the template writes, at most `max_chars`. Raises RenderError."""
    pieces, size = [], 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > max_chars:
                raise RenderError(f"The chat template wrote more than {max_chars} characters.")
            pieces.append(piece)
    except jinja2.TemplateError as error:
        raise RenderError(f"The chat template refused the conversation: {error}") from None
    except MemoryError:
        raise RenderError("The chat template takes more memory than it may have.") from None
    except _ERRORS as error:
        text = f"The chat template failed on this conversation ({type(error).__name__})."
        raise RenderError(text) from error
    return "".join(pieces)


def main() -> None:
    """Answer lines of JSON, the first of which is a template, until standard input ends.

    A rendering that takes longer than it may ends this process, wherever it is.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    limit_memory(_MEMORY_BYTES)
    source, template = json.loads(sys.stdin.readline()), None
    for line in sys.stdin:
        try:
            limit_s, max_chars, variables = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            template = template or SANDBOX.from_string(source)
            answer = [rendered(template, variables, max_chars), ""]
        except (RenderError, jinja2.TemplateError, MemoryError, *_ERRORS) as error:
            is_known = isinstance(error, RenderError)
            answer = ["", str(error) if is_known else f"The chat template is not valid Jinja: {error!r:.500}"]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)  # noqa: T201  # to the process that asked


class _Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks what the model wrote, for training; here it is ignored."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


SANDBOX = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
)
SANDBOX.filters["tojson"] = _to_json
SANDBOX.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}

if __name__ == "__main__":
    main()
