"""What a decoding step on a CPU costs besides arithmetic: CPU time of its thread, kernels that do nothing.

    python benchmarks/record.py cpu-host python benchmarks/cpu_host.py [--model MODEL] [--streams 1,16]

Each kernel is called with its arguments, and is the C function getpid instead; the logits are made before.
One JSON line per number of streams, for steps computed call by call and for recorded ones: ms of CPU time
per step, from the scheduler to the outputs, the smallest mean of five runs of 64 steps.
"""

import argparse
import ctypes
import json
import sys
import time

import torch

from octavo import LLM, SamplingParams
from octavo.config.model import DEFAULT_MODEL
from octavo.runtime.kernels.cpu import library, table
from octavo.runtime.models.decoder import Decoder

STEPS, RUNS = 64, 5


class IdleLibrary(library.Library):
    """Calls and replays cost what they cost, and compute nothing."""

    def replay(self, log):
        ctypes.CDLL(None).getpid()

    def _function(self, name, letters):
        real, idle = super()._function(name, letters), ctypes.CDLL(None)["getpid"]
        idle.argtypes = [library._C_TYPES[letter] for letter in letters]

        def function(*arguments):
            (idle if self.call_log is None else real)(*arguments)

        return function


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", default="1,16")
    args = parser.parse_args()
    table.load_library = lambda: IdleLibrary(library.shared_library())
    logits, made = Decoder.logits, torch.rand(64, 1 << 18)

    def random_logits(model, hidden):
        rows, size = logits(model, hidden).shape
        return made.view(-1)[: rows * size].view(rows, size)

    Decoder.logits = random_logits
    for streams in map(int, args.streams.split(",")):
        row = {"streams": streams, "model": args.model}
        for name, is_eager in (("by_call_ms", True), ("recorded_ms", False)):
            row[name] = round(measure(args.model, streams, is_eager), 3)
        print(json.dumps(row), flush=True)
    return 0


def measure(model: str, streams: int, is_eager: bool) -> float:
    """Milliseconds per step."""
    llm = LLM(model, max_model_len=2048, enforce_eager=is_eager, cpu_threads=1)
    work = [{"prompt_token_ids": [5 + i, *range(100, 163)]} for i in range(streams)]
    wanted = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True, detokenize=False)
    best = float("inf")
    for _ in range(RUNS + 1):
        start = time.thread_time()
        llm.generate(work, wanted, use_tqdm=False)
        best = min(best, time.thread_time() - start)
    llm.shutdown()
    return best / STEPS * 1e3


if __name__ == "__main__":
    sys.exit(main())
