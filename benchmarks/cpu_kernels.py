"""Where a workload's time goes on a CPU, kernel by kernel, steps computed call by call.

    python benchmarks/cpu_kernels.py MODEL --scripts FOLDER [--work W1,W4,W5] [--threads 2]

Workloads are those of `peers_cpu.py`. One JSON line per workload: its wall time, what is outside of kernels;
then one per kernel, the dearest first: seconds and calls, of products by the matrix and how many rows of x
they had.
"""

import argparse
import importlib
import json
import sys
import time
from collections import defaultdict

from octavo import LLM, SamplingParams
from octavo.runtime.kernels.cpu import library, table

ROWS = (1, 16, 32, 48, 64)  # products of up to so many are told apart
VOCABULARY = 49_000


class TimedLibrary(library.Library):
    """Notes how long every call takes."""

    def __init__(self, path):
        self.spent = defaultdict(lambda: [0.0, 0])
        super().__init__(path)

    def _function(self, name):
        real = super()._function(name)
        is_product = "matmul" in name or "feed_forward" in name

        def function(*arguments):
            start = time.perf_counter()
            real(*arguments)
            matrix = f"{arguments[5]} x {arguments[2]}" if is_product else ""
            rows = next((f"to {most}" for most in ROWS if arguments[1] <= most), "more") if is_product else ""
            spent = self.spent[name.removeprefix("octavo_"), matrix, rows]
            spent[0] += time.perf_counter() - start
            spent[1] += 1

        return function


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--scripts", required=True)
    parser.add_argument("--work", default="W1,W4,W5")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    sys.path.insert(0, args.scripts)
    make = importlib.import_module("workloads").make
    timed = TimedLibrary(library.shared_library())
    table.load_library = lambda _: timed
    options = {"max_model_len": 4096, "max_num_seqs": 64, "enforce_eager": True, "cpu_threads": args.threads}
    llm = LLM(args.model, device="cpu", **options)
    for work in args.work.split(","):
        run(llm, make(work, VOCABULARY, 0))
        timed.spent.clear()
        wall = run(llm, make(work, VOCABULARY, 1))
        inside = sum(seconds for seconds, _ in timed.spent.values())
        print(json.dumps({"work": work, "wall_s": round(wall, 3), "outside_s": round(wall - inside, 3)}))
        for (kernel, matrix, rows), (seconds, calls) in sorted(
            timed.spent.items(), key=lambda item: -item[1][0]
        ):
            row = {
                "work": work,
                "kernel": kernel,
                "matrix": matrix,
                "rows": rows,
                "calls": calls,
                "s": round(seconds, 4),
            }
            print(json.dumps(row), flush=True)
    llm.shutdown()
    return 0


def run(llm, work) -> float:
    """Seconds."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    wanted = [
        SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        for _, count in work
    ]
    start = time.perf_counter()
    llm.generate(prompts, wanted, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
