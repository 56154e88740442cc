"""What grammars cost: CPU time of whole runs with and without one, and host time of a step's masks alone.

    python benchmarks/record.py structured-overhead python -m benchmarks.structured_overhead
    python benchmarks/record.py structured-host python -m benchmarks.structured_overhead --host

Batches of the default model on the CPU, under constraints that cannot end before their tokens do. Runs
without a form, with it, and with all tokens asked about (no shortlist) take turns; CPU time of the process,
so that other work on the machine changes it little. Prints one JSON line per kind and batch: CPU ms per
token, the quotients to plain less 1 (aim: below 5 %), and µs per row for the masks and for walking on. Ends
with answers that came to their end, all of which must parse and validate.

--host: 256 rows over the vocabulary of Gemma 3, or of --tokenizer, which choose random tokens that are
allowed, without a model: ms to compile and open a request's grammar, ms of a step for the masks (all threads
together; the engine's own thread) and for walking on.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import psutil

from benchmarks.structured_schemas import generated
from octavo import LLM, SamplingParams
from octavo.base import hub
from octavo.config.model import DEFAULT_MODEL
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.engine.structured.matchers import RequestMatcher, RequestMatchers
from octavo.frontend.text.loader import load_tokenizer
from octavo.messages.request import Limits
from octavo.messages.structured import Constraint, StructuredOutputsParams, Vocabulary
from tests.structured import ORDER

LIST = """start: entry (", " entry)*
entry: NAME " = " (NUMBER | "\\"" TEXT "\\"" | "[" [entry ("; " entry)*] "]")
NAME: /[a-z_]{2,12}/
NUMBER: /-?[0-9]{1,6}(\\.[0-9]{1,3})?/
TEXT: /[^"\\n]{5,60}/
"""
PROMPT = "List some orders as JSON, each with id, status, gift, note and tags.\n"
PROCESS = psutil.Process()


def orders(least, most=None):
    items = {"type": "array", "minItems": least, "items": ORDER} | ({"maxItems": most} if most else {})
    return {"type": "object", "properties": {"orders": items}, "required": ["orders"]}


def kinds():
    """By name, what the requests of a batch ask for in turn."""
    many = [{"type": "array", "minItems": 99, "items": schema} for schema in generated(500)]
    return {
        "orders": [{"json": orders(40)}],
        "random schemas": [{"json": schema} for schema in many],
        "regex": [{"regex": "([A-Z][a-z]{2,11}( [a-z]{1,12}){3,9}[.!?] ){40,60}"}],
        "choice": [{"choice": [f"{word} " * 200 for word in ("yes", "no", "perhaps", "never")]}],
        "grammar": [{"grammar": LIST}],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, for --host")
    args = parser.parse_args()
    if args.host:
        with tempfile.TemporaryDirectory() as folder:
            path = write_vocabulary(Path(folder), args.tokenizer or hub.installed("gemma3-270m"))
            for kind, forms in kinds().items():
                row = {"kind": kind, "rows": 256} | measure_host(path, forms)
                with asking_about_all_tokens():
                    row["all_tokens_ms"] = measure_host(path, forms, num_steps=80)["masks_ms"]
                print(json.dumps(row), flush=True)
        return
    with LLM(args.model, max_model_len=1024, device="cpu") as llm:
        for kind, forms in kinds().items():
            for batch in args.batches if kind == "orders" else args.batches[-1:]:
                print(
                    json.dumps({"kind": kind, "rows": batch} | measure(llm, args, batch, forms)), flush=True
                )
        print(json.dumps({"kind": "validated"} | validate(llm)), flush=True)


def measure(llm, args, batch, forms):
    """Medians over the rounds; the first round warms up."""
    watch, plain, formed, unlisted = Watch(), [], [], []
    for round_ in range(-1, args.rounds):
        num_tokens = args.tokens if round_ >= 0 else 4
        plain.append(run(llm, batch, num_tokens, [{}]))
        with watch if round_ >= 0 else contextlib.nullcontext():
            formed.append(run(llm, batch, num_tokens, forms))
        with asking_about_all_tokens():
            unlisted.append(run(llm, batch, num_tokens, [differing(form) for form in forms]))
    return {
        "plain_ms": round(statistics.median(plain[1:]), 3),
        "formed_ms": round(statistics.median(formed[1:]), 3),
        "overhead": overhead(formed, plain),
        "overhead_all_tokens": overhead(unlisted, plain),
        "masks_us": watch.per_call("masks"),
        "feed_us": watch.per_call("feed"),
    }


def overhead(formed, plain):
    quotients = [with_form / without for with_form, without in zip(formed[1:], plain[1:], strict=True)]
    return round(statistics.median(quotients) - 1, 4)


def run(llm, batch, num_tokens, forms):
    """CPU ms per token of one batch; each request has a seed of its own, and none ends early."""
    params = [
        SamplingParams(
            temperature=1.0, seed=i, max_tokens=num_tokens, ignore_eos=True, structured_outputs=form or None
        )
        for i, form in zip(range(batch), forms * batch, strict=False)
    ]
    start = cpu_s()
    outputs = llm.generate([PROMPT] * batch, params, use_tqdm=False)
    spent = cpu_s() - start
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    assert lengths == {num_tokens}, lengths
    return 1000 * spent / (batch * num_tokens)


def cpu_s():
    times = PROCESS.cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def asking_about_all_tokens():
    """What is compiled meanwhile has no shortlist."""
    shortlists, GuidanceBackend._shortlists = GuidanceBackend._shortlists, lambda backend, grammar: {}
    try:
        yield
    finally:
        GuidanceBackend._shortlists = shortlists


def differing(form):
    """The same form in other words, so that it is compiled once more."""
    match form:
        case {"json": schema}:
            return {"json": schema | {"$comment": "all tokens"}}
        case {"regex": regex}:
            return {"regex": f"(?:{regex})"}
        case {"choice": texts}:
            return {"choice": texts[::-1]}
    return {"grammar": f"// all tokens\n{form['grammar']}"}


def validate(llm, batch=16):
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=400, structured_outputs={"json": orders(2, 3)})
        for i in range(batch)
    ]
    outputs = [output.outputs[0] for output in llm.generate([PROMPT] * batch, params, use_tqdm=False)]
    ended = [output.text for output in outputs if output.finish_reason == "stop"]
    for text in ended:
        jsonschema.validate(json.loads(text), orders(2, 3))
    assert ended
    return {"rows": batch, "ended": len(ended), "valid": len(ended)}


class Watch:
    """CPU µs per row in `token_masks` and `RequestMatcher.feed`, of all threads of the process."""

    def __init__(self):
        self._spent = {"masks": [], "feed": []}

    def __enter__(self):
        self._masks, self._feed = RequestMatchers.token_masks, RequestMatcher.feed
        RequestMatchers.token_masks = self._timed("masks", self._masks, lambda arguments: len(arguments[1]))
        RequestMatcher.feed = self._timed("feed", self._feed, lambda arguments: 1)

    def __exit__(self, *error):
        RequestMatchers.token_masks, RequestMatcher.feed = self._masks, self._feed

    def per_call(self, name):
        rows, seconds = map(sum, zip(*self._spent[name], strict=True))
        return round(1e6 * seconds / rows, 1)

    def _timed(self, name, function, num_rows):
        def timed(*arguments):
            start = time.process_time()
            try:
                return function(*arguments)
            finally:
                if rows := num_rows(arguments):
                    self._spent[name].append((rows, time.process_time() - start))

        return timed


def write_vocabulary(folder, model):
    tokenizer = load_tokenizer(model)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(len(tokenizer))]
    path = folder / "vocabulary"
    special_ids = sorted(tokenizer.special_ids)
    path.write_bytes(msgspec.msgpack.encode(Vocabulary(tokens, special_ids, special_ids[:1])))
    return path


class Asked(msgspec.Struct):
    """As much of an EngineRequest as a matcher needs."""

    constraint: Constraint
    limits: Limits


def measure_host(path, forms, num_rows=256, num_steps=160, num_first=40):
    """Means of CPU ms over the steps after the first ones."""
    vocabulary = msgspec.msgpack.decode(path.read_bytes(), type=Vocabulary)
    texts = [GuidanceBackend.translate(StructuredOutputsParams(**form)) for form in forms]
    matchers = RequestMatchers(len(vocabulary.tokens))
    asked = [Asked(Constraint(text, str(path), "guidance"), Limits(1)) for text in texts]
    matchers.open_matcher(asked[-1])  # makes the tables of the vocabulary
    began_s = time.process_time()
    rows = [matchers.open_matcher(asked[i % len(asked)]) for i in range(num_rows)]
    opened_ms = 1e3 * (time.process_time() - began_s) / num_rows
    draws, spent = Draws(vocabulary.tokens), []
    for _ in range(num_steps):
        all_s, own_s = time.process_time(), time.thread_time()
        masks = matchers.token_masks(list(enumerate(rows)))
        all_s, own_s = time.process_time() - all_s, time.thread_time() - own_s
        token_ids = draws.draw(masks)
        fed_s, feed_s = time.process_time(), time.thread_time()
        matchers.feed(list(zip(rows, token_ids, strict=True)))
        for row, token_id in zip(rows, token_ids, strict=True):
            row.feed(token_id)
        spent.append((all_s, own_s, time.process_time() - fed_s, time.thread_time() - feed_s))
    means = [round(1e3 * statistics.mean(part), 2) for part in zip(*spent[num_first:], strict=True)]
    names = ("masks_ms", "masks_own_ms", "feed_ms", "feed_own_ms")
    return {"open_ms": round(opened_ms, 2)} | dict(zip(names, means, strict=True))


class Draws:
    """Random tokens, frequent ones (of low numbers) more often and blanks seldom, as of a model."""

    def __init__(self, tokens):
        is_blank = np.array([token.isspace() for token in tokens])
        self._weights = np.where(is_blank, 1e-4, 1) / (np.arange(len(tokens)) + 100)
        self._ends = self._weights.cumsum()
        self._generator = np.random.default_rng(0)
        self._kept = {}

    def draw(self, masks):
        if masks.bits:
            new = np.frombuffer(masks.bits, np.uint8).reshape(len(masks.kept_at), -1)
            self._kept |= dict(zip(masks.kept_at, new, strict=True))
        return [self._of(self._kept[number]) for number in masks.numbers]

    def _of(self, bits):
        """One of the allowed tokens, first by trying."""
        ids = self._ends.searchsorted(self._generator.random(64) * self._ends[-1])
        ids = ids[bits[ids >> 3] >> (ids & 7) & 1 == 1]
        if not ids.size:
            places = np.flatnonzero(bits)
            ids = (places[:, None] * 8 + np.arange(8))[
                np.unpackbits(bits[places, None], 1, bitorder="little") == 1
            ]
            ids = ids[
                self._weights[ids]
                .cumsum()
                .searchsorted(self._generator.random() * self._weights[ids].sum()) :
            ]
        return int(ids[0])


if __name__ == "__main__":
    main()
