"""What a model ends with `stop` under a JSON schema parses and validates: hundreds of schemas, real weights.

    python benchmarks/record.py structured-schemas python -m benchmarks.structured_schemas --suite DIR

Two sources: Hypothesis (the strategy of tests/structured.py), and the schemas of the official
JSON-Schema-Test-Suite (DIR; the sdist of the package jsonschema holds it as json/tests/draft2020-12); each
with the default model and with random weights of the same shape. Prints one JSON line per source and weights:
schemas, those refused before they ran, outputs by finish reason, and outputs that do not parse or validate,
which must be none: the exit status says so.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path

import jsonschema
from hypothesis import HealthCheck, Phase, given, seed, settings
from jsonschema.exceptions import ValidationError

from octavo import LLM, RequestError, SamplingParams
from octavo.config.model import DEFAULT_MODEL
from tests.structured import SCHEMAS


def matches(validator, pattern, instance, schema):
    """`pattern` as ECMA 262 reads it: \\w, \\W, \\d and \\D are about ASCII."""
    if validator.is_type(instance, "string") and not re.search(pattern, instance, re.ASCII):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


KIND = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": matches})
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--weights", nargs="+", choices=("auto", "dummy"), default=["auto", "dummy"])
    parser.add_argument("--schemas", type=int, default=500, help="how many Hypothesis makes")
    parser.add_argument("--suite", type=Path, help="folder of the JSON-Schema-Test-Suite")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    sources = {"hypothesis": generated(args.schemas)}
    if args.suite:
        sources["JSON-Schema-Test-Suite"] = of_suite(args.suite)
    num_wrong = 0
    for weights in args.weights:
        with LLM(args.model, load_format=weights, max_model_len=1024, max_num_seqs=64) as llm:
            for source, schemas in sources.items():
                row = check(llm, schemas, args.max_tokens)
                print(json.dumps({"source": source, "weights": weights} | row), flush=True)
                num_wrong += row["wrong"]
    return num_wrong > 0


def generated(count):
    """Schemas that differ."""
    found = {}

    @seed(7)
    @settings(max_examples=3 * count, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(SCHEMAS)
    def collect(schema):
        found[json.dumps(schema, sort_keys=True)] = schema

    collect()
    return list(found.values())[:count]


def of_suite(folder):
    """Its schemas, but for True and False."""
    groups = [group for path in sorted(folder.rglob("*.json")) for group in json.loads(path.read_text())]
    return [group["schema"] for group in groups if isinstance(group["schema"], dict)]


def check(llm, schemas, max_tokens):
    """Every schema once; every other one greedily."""
    begin_s, counts, asked = time.monotonic(), Counter(), {}
    for index, schema in enumerate(schemas):
        params = SamplingParams(
            structured_outputs={"json": schema}, max_tokens=max_tokens, temperature=index % 2, seed=index
        )
        try:
            [name] = llm.enqueue([f"JSON for {json.dumps(schema)[:300]}:\n"], params, use_tqdm=False)
        except RequestError:
            counts["refused"] += 1
        else:
            asked[name] = schema
    for output in llm.wait_for_completion(use_tqdm=False):
        completion, schema = output.outputs[0], asked[output.request_id]
        counts[completion.finish_reason] += 1
        if completion.finish_reason == "stop" and (fault := fault_of(schema, completion.text)):
            counts["wrong"] += 1
            print(f"{json.dumps(schema)}: {completion.text!r}: {fault}", file=sys.stderr)
    return {
        "schemas": len(schemas),
        **{name: counts[name] for name in ("refused", "stop", "length", "error", "wrong")},
        "seconds": round(time.monotonic() - begin_s),
    }


def fault_of(schema, text):
    """Why the text is no instance; "" when it is one.

    In binary fractions -12.0011 is no multiple of 0.0001: what fails is judged again in decimal ones.
    """
    fault = ""
    for number in (float, Decimal):
        try:
            exact = json.loads(json.dumps(schema), parse_float=number)
            KIND(exact, format_checker=FORMATS).validate(json.loads(text, parse_float=number))
        except (ValueError, ValidationError) as error:
            fault = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            return ""
    return fault


if __name__ == "__main__":
    sys.exit(main())
