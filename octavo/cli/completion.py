"""Print a script that completes commands, flags and their values in bash or zsh.

bash: octavo completion bash > ~/.local/share/bash-completion/completions/octavo
zsh:  octavo completion zsh >> ~/.zshrc
"""

import argparse
from collections.abc import Iterator

from octavo.cli.main import COMMANDS, make_parser

_BASH = """\
_octavo() {{
  local words command group word previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    group="${{group:+$group }}$word"
    case "$group" in {commands}) command="$group" ;; esac
  done
  case "$command $previous" in
{values}
    *)
      case "$command" in
{flags}
      esac ;;
  esac
  case "$group" in
{groups}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _octavo octavo
"""
"""Where no word fits, the shell completes the names of files."""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh.")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    flags, values = [], []
    for command in COMMANDS:
        options = list(make_parser(command).options())
        long = [flag for option in options for flag in option.option_strings if flag.startswith("--")]
        flags.append(f'        "{command}") words="{" ".join(long)}" ;;')
        for option in options:
            if option.choices:
                cases = "|".join(f'"{command} {flag}"' for flag in option.option_strings or [command])
                values.append(f'    {cases}) words="{" ".join(map(str, option.choices))}" ;;')
    script = _BASH.format(
        values="\n".join(values),
        flags="\n".join(flags),
        groups="\n".join(_groups()),
        commands="|".join(f'"{name}"' for name in COMMANDS),
    )
    print((_ZSH if args.shell == "zsh" else "") + script, end="")
    return 0


def _groups() -> Iterator[str]:
    """A case for each beginning of a command, with the words that may follow."""
    following: dict[str, list[str]] = {}
    for name in COMMANDS:
        words = name.split()
        for place, word in enumerate(words):
            known = following.setdefault(" ".join(words[:place]), [])
            known += [] if word in known else [word]
    return (f'    "{group}") words="{" ".join(words)}" ;;' for group, words in following.items())
