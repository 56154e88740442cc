"""`--help=WORD`: a part of a command's help. Called by main before the command line is parsed.

--help=all | page        everything; page by page
--help=listgroup         the groups of options
--help=SchedulerConfig   the options of one group
--help=max-num-seqs      one option; part of a name: all that have it
"""

import argparse
import sys
from collections.abc import Callable

from octavo.base.errors import ConfigError

_FLAG = "--help="


def asked_for(argv: list[str]) -> str | None:
    """The word behind `--help=`, if there is one."""
    end = argv.index("--") if "--" in argv else len(argv)
    return next((word.removeprefix(_FLAG) for word in argv[:end] if word.startswith(_FLAG)), None)


def show(parser: argparse.ArgumentParser, word: str) -> None:
    """Print the part that `word` names. Raises ConfigError for a word that names nothing."""
    text = parser.format_help() if word in ("all", "page") else _part(parser, word.strip("-").lower())
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


def _part(parser: argparse.ArgumentParser, word: str) -> str:
    groups = _groups(parser)
    if word == "listgroup":
        width = max(map(len, groups))
        return "\n".join(f"{name:<{width}}  {group.description or ''}" for name, group in groups.items())
    if word in map(str.lower, groups):
        chosen = next(group for name, group in groups.items() if name.lower() == word)
        return _format(parser, chosen, chosen._group_actions)  # argparse has no other way
    name = word.replace("_", "-")
    return _found(parser, lambda flag: flag == name) or _found(parser, lambda flag: name in flag)


def _groups(parser: argparse.ArgumentParser) -> dict[str, "argparse._ArgumentGroup"]:
    """Those that show something, by the first word of their titles."""
    return {
        (group.title or "").partition(" ")[0]: group
        for group in parser._action_groups
        if any(action.help is not argparse.SUPPRESS for action in group._group_actions)
    }


def _found(parser: argparse.ArgumentParser, fits: Callable[[str], bool]) -> str:
    """The options whose names fit, by group."""
    parts = []
    for group in _groups(parser).values():
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        found = [action for action in shown if any(fits(flag.strip("-")) for flag in action.option_strings)]
        if found:
            parts.append(_format(parser, group, found))
    return "\n".join(parts)


def _format(
    parser: argparse.ArgumentParser, group: "argparse._ArgumentGroup", actions: list[argparse.Action]
) -> str:
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()
