"""Answer one or several prompts, all at once, and say how fast it went.

Prompts are arguments; "-" reads one from standard input. A model with a chat template gets each prompt as a
user's message; --raw sends the text as it stands. Several answers grow side by side on a terminal.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import octavo
from octavo.base.errors import ConfigError
from octavo.cli.chat import with_system
from octavo.cli.display import choose
from octavo.cli.flags import add_engine_flags, engine_args
from octavo.cli.run_stats import RunStats
from octavo.cli.sampling_flags import add_sampling_flags, check_sampling, sampling_params
from octavo.messages.sampling import SamplingParams

_MAX_TOKENS = 256

EXAMPLES = """\
  octavo generate "What is the capital of France?" "Name three animals that can fly."
  octavo generate --raw --temperature 0.8 --seed 7 --n 4 "Once upon a time"
  octavo generate --model ./model.gguf - < prompt.txt
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help='A prompt; "-" = standard input.')
    parser.add_argument("--raw", action="store_true", help="Apply no chat template.")
    parser.add_argument("--system-prompt", default="", metavar="TEXT", help="System message of every prompt.")
    group = add_sampling_flags(parser)
    group.add_argument(
        "--n",
        type=int,
        default=1,
        metavar="N",
        help="Answers per prompt; sampled at temperature 1 where one would be greedy.",
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompts; the answers go to stdout, all else to stderr."""
    prompts = [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt for prompt in args.prompts]
    if not prompts:
        raise ConfigError('Give at least one prompt, as in: octavo generate "What is the capital of France?"')
    check_sampling(args)
    begun_s = time.monotonic()
    with octavo.LLM.from_engine_args(engine_args(args)) as llm:
        params = sampling_params(args, llm.get_default_sampling_params(), _MAX_TOKENS, args.n)
        asked: list[octavo.PromptType] = list(prompts)
        if llm.has_chat_template and not args.raw:
            turns = [with_system(args.system_prompt, [{"role": "user", "content": p}]) for p in prompts]
            asked = [llm.render_chat(turn) for turn in turns]
        ready_s = time.monotonic() - begun_s
        stats, display = RunStats(), choose(prompts, params.n)
        try:
            for output in answers(llm.llm_engine, asked, params):
                stats.update(output)
                display.update(output)
        finally:
            display.close()
    print(f"{stats.line()}; engine ready in {ready_s:.2f} s", file=sys.stderr)
    for request_id, text in stats.errors():
        print(f"prompt {int(request_id) + 1} failed: {text}", file=sys.stderr)
    return 1 if stats.errors() else 0


def answers(
    engine: "octavo.LLMEngine", prompts: list["octavo.PromptType"], params: SamplingParams
) -> Iterator["octavo.RequestOutput"]:
    """Add all prompts at once and yield outputs (cumulative) as they come; request i has the id str(i)."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests():
        yield from engine.step()
