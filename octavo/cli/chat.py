"""Talk to a model in the terminal.

The conversation goes on until /exit or the end of input; /reset forgets it, /system TEXT sets the system
message, /help lists the commands. Ctrl-C stops an answer. Input may be piped: each line is a message. -q asks
one question and ends. The growing conversation is found in the prefix cache, so each turn computes its new
text only.
"""

import argparse
import contextlib
import itertools
import sys

import octavo
from octavo.base.errors import ConfigError, PromptTooLong, RequestError
from octavo.cli.display import Stream
from octavo.cli.flags import add_engine_flags, engine_args
from octavo.cli.sampling_flags import add_sampling_flags, sampling_params

_HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit ends"
_PROMPT = "> "


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="The same as --model.")
    parser.add_argument("--system-prompt", default="", metavar="TEXT", help="The system message.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Ask this, print the answer, end.")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Hold the conversation; answers go to stdout, all else to stderr."""
    if args.model_name:
        args.model = args.model_name
    with octavo.LLM.from_engine_args(engine_args(args)) as llm:
        if not llm.has_chat_template:
            raise ConfigError(
                "This model has no chat template: give one with --chat-template, or use `octavo generate`."
            )
        params = sampling_params(args, llm.get_default_sampling_params(), None)
        conversation = Conversation(llm, params, args.system_prompt)
        if args.quick is not None:
            conversation.ask(args.quick)
        else:
            _converse(conversation)
    return 0


def with_system(system_prompt: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The messages, after a system message if there is one."""
    return [{"role": "system", "content": system_prompt}, *messages] if system_prompt else messages


class Conversation:
    """The messages so far, and the engine that answers the next one."""

    def __init__(self, llm: "octavo.LLM", params: "octavo.SamplingParams", system_prompt: str = "") -> None:
        self._llm = llm
        self._params = params
        self._turns = itertools.count()
        self.system_prompt = system_prompt
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages.clear()

    def ask(self, text: str) -> str:
        """Print and return the answer to `text`, and remember both; a RequestError leaves nothing behind."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self._answer(self._llm.render_chat(with_system(self.system_prompt, asked)))
        if answer.error is not None:
            raise RequestError(answer.error)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer.text

    def _answer(self, prompt: "octavo.PromptType") -> "octavo.CompletionOutput":
        engine, request_id = self._llm.llm_engine, str(next(self._turns))
        engine.add_request(request_id, prompt, self._params)
        display, answer = Stream(sys.stdout), octavo.CompletionOutput(index=0, text="", token_ids=[])
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    display.update(output)
                    answer = output.outputs[0]
        except KeyboardInterrupt:  # stops this answer; what was said stays in the conversation
            engine.abort_request([request_id])
        finally:
            display.close()
        return answer


def _converse(conversation: Conversation) -> None:
    """Read messages and commands until /exit, the end of input, or Ctrl-C at the prompt."""
    if sys.stdin.isatty():
        _enable_line_editing()
        print(_HELP, file=sys.stderr)
    while (line := _read_line()) is not None:
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
            _ask(conversation, line)


def _ask(conversation: Conversation, text: str) -> None:
    try:
        conversation.ask(text)
    except RequestError as error:
        hint = " /reset starts anew." if isinstance(error, PromptTooLong) else ""
        print(f"{error}{hint}", file=sys.stderr)


def _read_line() -> str | None:
    """The next line of input without its ends; None when there is none."""
    try:
        return input(_PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # not part of every Python build
        import readline  # noqa: F401  # its import gives input() history and editing
