"""Continue texts in the terminal; with --url by a model on a server.

Each line of input is a text, continued as it stands, without a chat template, until the end of input. Ctrl-C
stops a continuation. -q continues one text and ends.
"""

import argparse

from octavo.cli.terminal import add_backend_flags, lines, open_backend, show, survives

_MAX_TOKENS = 256

EXAMPLES = """\
  octavo complete -q "Once upon a time"
  octavo complete --url http://127.0.0.1:8000 < beginnings.txt
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_backend_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Continue text after text; continuations go to stdout, all else to stderr."""
    with open_backend(args, max_tokens=_MAX_TOKENS) as backend:
        if args.quick is not None:
            show(backend.complete(args.quick), stats=args.stats)
            return 0
        for line in filter(None, lines()):
            with survives():
                show(backend.complete(line), stats=args.stats)
    return 0
