"""The terminal's side of `chat` and `complete`: their flags, their backend, lines in, answers out."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

import octavo
from octavo.base import env
from octavo.base.errors import ConfigError, EngineDead, OctavoError, PromptTooLong
from octavo.cli.backend import Answer, Backend, LocalModel
from octavo.cli.display import Stream
from octavo.cli.flags import add_engine_flags, engine_args, engine_flags_given
from octavo.cli.remote import Remote
from octavo.cli.run_stats import Pace
from octavo.cli.sampling_flags import add_sampling_flags, check_sampling, given_sampling, sampling_params

_PROMPT = "> "


def add_backend_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what says who answers, and how."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Ask this, print the answer, end.")
    parser.add_argument("--stats", action="store_true", help="Say after each answer how fast it came.")
    server = parser.add_argument_group("server (instead of a model loaded here)")
    server.add_argument("--url", metavar="URL", help="Ask this OpenAI-compatible server.")
    server.add_argument("--model-name", dest="name", metavar="NAME", help="Its model; its first by default.")
    server.add_argument("--api-key", metavar="KEY", help="Default: the variable OPENAI_API_KEY.")
    add_sampling_flags(parser)
    add_engine_flags(parser)


@contextlib.contextmanager
def open_backend(args: argparse.Namespace, max_tokens: int | None) -> Iterator[Backend]:
    """The server of --url, or the model, loaded here. max_tokens: of an answer, unless the user says it."""
    name = args.name or args.model_tag
    if args.url:
        if foreign := engine_flags_given(args):
            raise ConfigError(
                f"--url asks a server, which has its own options: leave out {', '.join(foreign)}."
            )
        sampling = {"max_tokens": max_tokens} if max_tokens else {}
        yield Remote(
            args.url,
            model=name or "",
            api_key=args.api_key or env.openai_api_key(),
            sampling=sampling | given_sampling(args),
        )
        return
    args.model = name or args.model
    check_sampling(args)
    with octavo.LLM.from_engine_args(engine_args(args)) as llm:
        yield LocalModel(llm, sampling_params(args, llm.get_default_sampling_params(), max_tokens))


def show(answer: Answer, *, stats: bool = False) -> str:
    """Print an answer as it comes, and return it; Ctrl-C stops it."""
    display, pace, text = Stream(sys.stdout), Pace(), ""
    try:
        for piece in answer:
            display.write(piece.text)
            pace.note(piece.num_tokens)
            text += piece.text
    except KeyboardInterrupt:
        answer.close()
    except OctavoError:
        if text:
            display.close()
        raise
    display.close()
    if stats:
        print(pace.line(), file=sys.stderr)
    return text


def lines() -> Iterator[str]:
    """The lines of input without their ends, with a prompt and editing on a terminal."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not part of every Python build
            import readline  # noqa: F401  # its import gives input() history and editing
    with contextlib.suppress(EOFError):
        while True:
            yield input(_PROMPT if sys.stdin.isatty() else "").strip()


@contextlib.contextmanager
def survives() -> Iterator[None]:
    """A question that fails is reported, and the next may be asked; what concerns all is the end."""
    try:
        yield
    except (ConfigError, EngineDead):
        raise
    except OctavoError as error:
        hint = " /reset starts anew." if isinstance(error, PromptTooLong) else ""
        print(f"{error}{hint}", file=sys.stderr)
