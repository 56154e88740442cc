"""Talk to a model in the terminal; with --url to one on a server.

The conversation goes on until /exit or the end of input; /reset forgets it, /system TEXT sets the system
message, /help lists the commands. Ctrl-C stops an answer. Input may be piped: each line is a message. -q asks
one question and ends. The growing conversation is found in the prefix cache, so each turn computes its new
text only.
"""

import argparse
import sys

from octavo.cli.backend import Backend, Message
from octavo.cli.terminal import add_backend_flags, lines, open_backend, show, survives

_HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit ends"

EXAMPLES = """\
  octavo chat
  octavo chat org/name --system-prompt "Answer in one sentence."
  octavo chat --url http://127.0.0.1:8000
  octavo chat -q "Why is the sky blue?"
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--system-prompt", default="", metavar="TEXT", help="The system message.")
    add_backend_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Hold the conversation; answers go to stdout, all else to stderr."""
    with open_backend(args, max_tokens=None) as backend:
        conversation = Conversation(backend, args.system_prompt, stats=args.stats)
        if args.quick is not None:
            conversation.ask(args.quick)
        else:
            _converse(conversation)
    return 0


def with_system(system_prompt: str, messages: list[Message]) -> list[Message]:
    """The messages, after a system message if there is one."""
    return [{"role": "system", "content": system_prompt}, *messages] if system_prompt else messages


class Conversation:
    """The messages so far, and who answers the next one."""

    def __init__(self, backend: Backend, system_prompt: str = "", *, stats: bool = False) -> None:
        self._backend = backend
        self._stats = stats
        self.system_prompt = system_prompt
        self.messages: list[Message] = []

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages.clear()

    def ask(self, text: str) -> str:
        """Print and return the answer to `text`, and remember both; an error leaves nothing behind."""
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces = self._backend.chat(with_system(self.system_prompt, asked))
        answer = show(pieces, stats=self._stats)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer


def _converse(conversation: Conversation) -> None:
    """Obey lines until /exit, the end of input, or Ctrl-C at the prompt."""
    if sys.stdin.isatty():
        print(_HELP, file=sys.stderr)
    for line in lines():
        command, _, rest = line.partition(" ")
        if not line:
            continue
        if command in ("/exit", "/quit"):
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.system_prompt = rest.strip()
        elif command.startswith("/"):
            print(_HELP, file=sys.stderr)
        else:
            with survives():
                conversation.ask(line)
