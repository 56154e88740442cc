"""Print the vectors of texts, a line of JSON each: index, embedding.

"-" reads texts from standard input, one a line. Without --model, the built-in minilm embeds.
"""

import argparse
import json
import sys

import octavo
from octavo.base.errors import ConfigError
from octavo.cli.flags import add_engine_flags, engine_options
from octavo.config.args import EngineArgs

EXAMPLES = """\
  octavo embed "How do plants eat?" "Photosynthesis makes sugar of light."
  octavo embed --model minilm - < texts.txt
"""
WHOLE = {"truncate_prompt_tokens": -1, "truncation_side": "right"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("texts", nargs="*", metavar="TEXT", help='A text; "-" = lines of standard input.')
    add_engine_flags(parser)


def read_texts(given: list[str], what: str) -> list[str]:
    """Return the texts, those of standard input among them. Raises ConfigError if there are none."""
    texts = [line for text in given for line in (sys.stdin.read().splitlines() if text == "-" else [text])]
    if not texts:
        raise ConfigError(f"Give at least one {what}.")
    return texts


def pooling_args(args: argparse.Namespace) -> EngineArgs:
    """Return the engine's options; the built-in model that embeds is the default."""
    return EngineArgs.from_options({"model": "minilm"} | engine_options(args))


def run(args: argparse.Namespace) -> int:
    """Embed the texts; what is too long is cut."""
    texts = read_texts(args.texts, "text")
    with octavo.LLM.from_engine_args(pooling_args(args)) as llm:
        for index, output in enumerate(llm.embed(texts, use_tqdm=False, tokenization_kwargs=WHOLE)):
            print(json.dumps({"index": index, "embedding": output.outputs.embedding}))
    return 0
