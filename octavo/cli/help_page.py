"""`--help`: what one needs first; `--help=WORD`: a part. Called by main before the command line is parsed.

--help                   examples, the options used most, and the words below
--help=all | page        everything; page by page
--help=listgroup         the groups of options
--help=SchedulerConfig   the options of one group
--help=max-num-seqs      one option; part of a name: all that have it
"""

import argparse
import sys
from collections.abc import Callable

from octavo.base.errors import ConfigError
from octavo.cli.parser import Parser

_FLAG = "--help="
_FEW = 15
"""Options that need no overview."""
_MOST_USED = """--config --model --host --port --api-key --url --system-prompt --raw --temperature
    --max-tokens --max-model-len --max-num-seqs --gpu-memory-utilization --tensor-parallel-size --dtype
    --quantization --kv-cache-dtype --tool-call-parser --device-memory --json --input-file --output-file"""


def asked_for(argv: list[str]) -> str | None:
    """The word behind `--help=`, "" for `--help` alone, None without it."""
    end = argv.index("--") if "--" in argv else len(argv)
    words = [word for word in argv[:end] if word.startswith(_FLAG) or word in ("-h", "--help")]
    return words[0].partition("=")[2] if words else None


def show(parser: Parser, word: str) -> None:
    """Print the part that `word` names. Raises ConfigError for a word that names nothing."""
    if not word:
        text = _overview(parser)
    elif word in ("all", "page"):
        text = parser.format_help()
    else:
        text = _part(parser, word.strip("-").lower())
    if not text:
        raise ConfigError(
            f"--help={word} names no group or option of {parser.prog}. Groups: {', '.join(_groups(parser))}; "
            "all, page and listgroup are known, too."
        )
    if word == "page" and sys.stdout.isatty():
        from pydoc import pager  # seldom wanted, and slow to import

        pager(text)
    else:
        print(text.rstrip())


def _overview(parser: Parser) -> str:
    """Examples and the options used most, where there are many."""
    options = list(parser.options())
    if len(options) <= _FEW:
        return parser.format_help()
    words = _MOST_USED.split()
    used = [option for option in options if set(option.option_strings).intersection(words)]
    places = [f"[{option.metavar}]" for option in options if not option.option_strings]
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.add_usage(" ".join([parser.prog, *places, "[options]"]), [], [])
    formatter.add_text(parser.description)
    formatter.add_text(parser.epilog)
    formatter.start_section(f"options used most, of {len(options)}")
    formatter.add_arguments(used)
    formatter.end_section()
    formatter.add_text(
        f"`{parser.prog} --help=all` shows all options, --help=TOPIC those of one topic:\n"
        f"{', '.join(list(_groups(parser))[2:])};\nor those whose names have TOPIC in them."
    )
    return formatter.format_help()


def _part(parser: Parser, word: str) -> str:
    groups = _groups(parser)
    if word == "listgroup":
        width = max(map(len, groups))
        return "\n".join(f"{name:<{width}}  {group.description or ''}" for name, group in groups.items())
    if word in map(str.lower, groups):
        chosen = next(group for name, group in groups.items() if name.lower() == word)
        return _format(parser, chosen, chosen._group_actions)  # argparse has no other way
    name = word.replace("_", "-")
    return _found(parser, lambda flag: flag == name) or _found(parser, lambda flag: name in flag)


def _groups(parser: Parser) -> dict[str, "argparse._ArgumentGroup"]:
    """Those that show something, by the first word of their titles."""
    return {
        (group.title or "").partition(" ")[0]: group
        for group in parser._action_groups
        if any(action.help is not argparse.SUPPRESS for action in group._group_actions)
    }


def _found(parser: Parser, fits: Callable[[str], bool]) -> str:
    parts = []
    for group in _groups(parser).values():
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        found = [action for action in shown if any(fits(flag.strip("-")) for flag in action.option_strings)]
        if found:
            parts.append(_format(parser, group, found))
    return "\n".join(parts)


def _format(parser: Parser, group: "argparse._ArgumentGroup", actions: list[argparse.Action]) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
