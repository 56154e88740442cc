"""The sampling flags that `generate` and `chat` share.

Only flags that were given are applied, on top of what the model recommends; a model that recommends nothing
is decoded greedily here, because in a terminal one expects the same answer to the same question. Several
answers of one that would be greedy are sampled at temperature 1, as over HTTP.
"""

import argparse
from typing import Any, NamedTuple

import msgspec

from octavo.messages.sampling import RequestOutputKind, SamplingParams


class _Flag(NamedTuple):
    type: type
    help: str


_FLAGS = {
    "temperature": _Flag(float, "0 = greedy; higher = more varied."),
    "top_p": _Flag(float, "Keep the most likely tokens whose probabilities reach this sum."),
    "top_k": _Flag(int, "Keep this many of the most likely tokens; 0 = all."),
    "min_p": _Flag(float, "Keep tokens at least this many times as likely as the most likely one."),
    "presence_penalty": _Flag(float, "Subtracted once from every token that the output has."),
    "frequency_penalty": _Flag(float, "Subtracted per occurrence in the output."),
    "repetition_penalty": _Flag(float, "Above 1: tokens of prompt and output become less likely."),
    "min_tokens": _Flag(int, "No end before this many tokens."),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags; `--seed` is already there as an engine flag."""
    group = parser.add_argument_group("sampling (default: what the model recommends, else greedy)")
    for name, flag in _FLAGS.items():
        metavar = "N" if flag.type is int else "X"
        group.add_argument("--" + name.replace("_", "-"), type=flag.type, metavar=metavar, help=flag.help)
    group.add_argument("--max-tokens", type=int, metavar="N", help="Maximum number of tokens in an answer.")
    group.add_argument("--stop", action="append", metavar="TEXT", help="Ends the answer; may be repeated.")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="Go on to --max-tokens.")
    return group


def check_sampling(args: argparse.Namespace) -> None:
    """Raise RequestError for a value out of range, before a model is loaded."""
    SamplingParams(**given_sampling(args))


def sampling_params(
    args: argparse.Namespace, recommended: SamplingParams, max_tokens: int | None, n: int = 1
) -> SamplingParams:
    """The parameters of a request: the model's recommendation, the flags given, `max_tokens` unless given.

    Raises RequestError for a value out of range.
    """
    chosen = msgspec.structs.asdict(recommended)
    if recommended == SamplingParams():
        chosen["temperature"] = 0.0
    if n > 1:
        chosen["temperature"] = chosen["temperature"] or 1.0
    chosen |= {"max_tokens": max_tokens} | given_sampling(args)
    return SamplingParams(**chosen | {"n": n, "output_kind": RequestOutputKind.CUMULATIVE})


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, by the names of SamplingParams, which are those of a request's fields over HTTP."""
    names = [*_FLAGS, "seed", "stop", "ignore_eos", "max_tokens"]
    return {name: value for name in names if (value := getattr(args, name)) is not None}
