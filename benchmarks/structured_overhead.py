"""What a grammar costs per token: CPU time of whole runs with and without one, and of the masks alone.

    python benchmarks/record.py structured-overhead python -m benchmarks.structured_overhead

Batches of the default model on the CPU, all under one JSON schema that cannot end before its tokens do. Runs
with and without it take turns; CPU time of the process, so that other work on the machine changes it little.
Prints one JSON line per number of steps in flight: CPU ms per token of either kind, their quotient less 1
(aim: below 5 %), and µs per row for the masks (threads of the library together) and for walking on.
"""

import argparse
import json
import statistics
import time

import psutil

from octavo import LLM, SamplingParams
from octavo.config.model import DEFAULT_MODEL
from octavo.engine.structured.matchers import RequestMatcher, RequestMatchers

SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["kind", "tall", "quick"]}, "minItems": 1},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
PROMPT = "List some persons as JSON, each with name, age and tags.\n"
PROCESS = psutil.Process()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for steps_in_flight in (1, 2):
        with LLM(args.model, max_model_len=512, device="cpu", steps_in_flight=steps_in_flight) as llm:
            print(json.dumps({"steps_in_flight": steps_in_flight} | measure(llm, args)), flush=True)


def measure(llm, args):
    watch = Watch()
    run(llm, 4, 8, {}), run(llm, 4, 8, {"structured_outputs": {"json": SCHEMA}})
    watch.clear()
    plain, formed = [], []
    for _ in range(args.rounds):
        plain.append(run(llm, args.batch, args.tokens, {}))
        formed.append(run(llm, args.batch, args.tokens, {"structured_outputs": {"json": SCHEMA}}))
    quotients = [with_form / without for with_form, without in zip(formed, plain, strict=True)]
    watch.stop()
    return {
        "plain_ms": round(statistics.median(plain), 3),
        "formed_ms": round(statistics.median(formed), 3),
        "overhead": round(statistics.median(quotients) - 1, 4),
        "masks_us": watch.per_call("masks"),
        "feed_us": watch.per_call("feed"),
    }


def run(llm, batch, num_tokens, form):
    """CPU ms per token of one batch; each request has a seed of its own, and none ends early."""
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=num_tokens, ignore_eos=True, **form)
        for i in range(batch)
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


class Watch:
    """CPU µs per row in `token_masks` and `RequestMatcher.feed`, of all threads of the process."""

    def __init__(self):
        self._spent = {"masks": [], "feed": []}
        self._masks, self._feed = RequestMatchers.token_masks, RequestMatcher.feed
        RequestMatchers.token_masks = self._timed(
            "masks", RequestMatchers.token_masks, lambda arguments: len(arguments[1])
        )
        RequestMatcher.feed = self._timed("feed", RequestMatcher.feed, lambda arguments: 1)

    def stop(self):
        RequestMatchers.token_masks, RequestMatcher.feed = self._masks, self._feed

    def clear(self):
        for spent in self._spent.values():
            spent.clear()

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


if __name__ == "__main__":
    main()
