"""Every row of the GPU table: check that recorded steps change no token, then time octavo on the same work.

python benchmarks/record.py gpu python benchmarks/gpu.py [--models qwen3-0.6b,llama-3.1-8b]
       [--rows nano,decode] [--repeats N]

Prints one JSON line per row, beside vLLM 0.26's figure on one H200 and the counted floor. Weights are random
(uniform in ±0.001), prompts are random ids, fresh in every repeat; the length of every output is checked.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams, TokensPrompt
from octavo.runtime.sampling.output import Moment

_COMMON = {"hidden_act": "silu", "head_dim": 128, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "llama-3.1-8b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}
PEER: dict[str, tuple[float, float | None]] = {
    "nano out_tok_s": (24093, 32900),
    "mixed8b out_tok_s": (12533, 15500),
    "decode qwen3-0.6b 1 ms_per_step": (1.62, 0.3),
    "decode qwen3-0.6b 32 ms_per_step": (1.85, 0.5),
    "decode qwen3-0.6b 256 ms_per_step": (4.57, 2.1),
    "decode llama-3.1-8b 1 ms_per_step": (4.84, 3.6),
    "decode llama-3.1-8b 32 ms_per_step": (5.44, 3.8),
    "decode llama-3.1-8b 128 ms_per_step": (7.22, 4.6),
    "decode llama-3.1-8b 256 ms_per_step": (10.93, 5.6),
    "prefill8b_1x8192 tok_s": (37972, 48000),
    "prefill8b_32x2048 tok_s": (42874, 53000),
    "prefix8b wall_s": (2.20, None),
    "long8b ms_per_step": (12.66, 11.7),
    "start_s": (29.4, None),
}
"""vLLM 0.26 on one H200, and the floor: bytes or arithmetic that no engine can leave out."""
ROWS = {
    "qwen3-0.6b": ("start", "check", "nano", "decode", "host"),
    "llama-3.1-8b": ("check", "decode", "host", "prefill8b", "prefix8b", "long8b", "mixed8b", "beside8b"),
}
BATCHES = {"qwen3-0.6b": (1, 32, 256), "llama-3.1-8b": (1, 32, 128, 256)}
MAX_ID = 100_000
Work = tuple[list[list[int]], list[int]]


class Bench:
    """One model on the GPU."""

    def __init__(self, name: str, folder: Path, repeats: int, quantization: str | None) -> None:
        self.name, self.folder, self.repeats, self.quantization = name, folder, repeats, quantization
        self._llm: LLM | None = None

    def run(self, rows: list[str]) -> Iterator[dict[str, Any]]:
        for row in rows:
            for found in getattr(self, row)():
                yield found | ({"quantization": self.quantization} if self.quantization else {})
        self.close()

    @property
    def llm(self) -> LLM:
        self._llm = self._llm or self._make()
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None

    def _make(self, **options: object) -> LLM:
        longest = 4096 if self.name == "qwen3-0.6b" else 17408
        given = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
        given["quantization"] = self.quantization
        return LLM(str(self.folder), max_model_len=longest, gpu_memory_utilization=0.85, **given, **options)

    def generate(self, work: Work, temperature: float = 0.0, seed: int | None = None) -> list[list[int]]:
        return self._timed(work, temperature, seed)[1]

    def seconds(self, work: Work, temperature: float = 0.0) -> float:
        return self._timed(work, temperature)[0]

    def _timed(
        self, work: Work, temperature: float, seed: int | None = None
    ) -> tuple[float, list[list[int]]]:
        """(s in LLM.generate, the tokens of every output)"""
        prompts, lengths = [TokensPrompt(prompt_token_ids=p) for p in work[0]], work[1]
        params = [
            SamplingParams(
                temperature=temperature, seed=seed, max_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in lengths
        ]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - began
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if [len(ids) for ids in tokens] != lengths:
            raise SystemExit("An output has the wrong length.")
        return took, tokens

    def time(self, make: Callable[[int], Work], temperature: float = 0.0) -> tuple[float, list[float], Work]:
        """(median s, all s, work of the last); before it a short run of other prompts."""
        prompts, lengths = make(1000)
        self.generate((prompts, [min(n, 8) for n in lengths]), temperature)
        walls = [self.seconds(work := make(r), temperature) for r in range(self.repeats)]
        return statistics.median(walls), walls, work

    def check(self) -> Iterator[dict[str, Any]]:
        """Tokens of recorded steps and of eager ones, at sizes that need no padding: bit for bit the same."""
        works = [(size, t) for size in (1, 8, 32, 200) for t in (0.0, 0.6)]
        texts = []
        for options in ({"enforce_eager": True, "steps_in_flight": 1}, {}):
            self.close()
            self._llm = self._make(**options)
            rng = random.Random(0)
            prompts = random_prompts(rng, [rng.randint(20, 200) for _ in range(200)])
            texts.append([self.generate((prompts[:n], [48] * n), t, seed=n) for n, t in works])
        for (size, temperature), eager, recorded in zip(works, *texts, strict=True):
            equal = sum(a == b for a, b in zip(eager, recorded, strict=True))
            yield {
                "row": "check",
                "model": self.name,
                "batch": size,
                "temperature": temperature,
                "equal": equal,
            }
            if equal != size:
                raise SystemExit(f"{size - equal} of {size} outputs differ between eager and recorded steps.")

    def start(self) -> Iterator[dict[str, Any]]:
        """From the start of a process to its first token, with whatever the caches of kernels hold."""
        program = (
            f"import time; from benchmarks.gpu import Bench; from pathlib import Path; "
            f"b = Bench({self.name!r}, Path({str(self.folder)!r}), 1); b.generate(([[1] * 64], [1])); "
            "print(time.time()); b.close()"
        )
        for run in ("first", "again"):
            began = time.time()
            child = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
            took = round(float(child.stdout.split()[-1]) - began, 2)
            yield with_peer({"row": "start", "model": self.name, "caches": run, "start_s": took}, "start_s")

    def nano(self) -> Iterator[dict[str, Any]]:
        """256 requests of 100 to 1024 in and out, drawn at temperature 0.6: nano-vllm's benchmark."""

        def make(repeat: int) -> Work:
            rng = random.Random(0)  # in nano-vllm's order, ids of prompts between their lengths
            lengths = []
            for _ in range(256):
                lengths.append(rng.randint(100, 1024))
                for _ in range(lengths[-1]):
                    rng.randint(0, 10000)
            outputs = [rng.randint(100, 1024) for _ in range(256)]
            return random_prompts(random.Random(f"nano-{repeat}"), lengths), outputs

        yield self._throughput("nano", make, 0.6)

    def mixed8b(self) -> Iterator[dict[str, Any]]:
        """1000 requests with log-normal lengths, greedy."""

        def length(rng: random.Random, most: int) -> int:
            return max(4, min(most, int(rng.lognormvariate(5.0214609, 1.0))))

        def make(repeat: int) -> Work:
            rng = random.Random(1)
            lengths = [(length(rng, 2048), length(rng, 1024)) for _ in range(1000)]
            tokens = random.Random(f"mixed-{repeat}")
            return random_prompts(tokens, [a for a, _ in lengths]), [b for _, b in lengths]

        yield self._throughput("mixed8b", make)

    def _throughput(self, row: str, make: Callable[[int], Work], temperature: float = 0.0) -> dict[str, Any]:
        wall, walls, (prompts, lengths) = self.time(make, temperature)
        found = {"row": row, "model": self.name, "in_tok": sum(map(len, prompts)), "out_tok": sum(lengths)}
        found |= {
            "wall_s": wall,
            "walls": [round(w, 3) for w in walls],
            "out_tok_s": round(sum(lengths) / wall),
        }
        return with_peer(found, f"{row} out_tok_s")

    def decode(self) -> Iterator[dict[str, Any]]:
        """128 in, 256 out: the time of a step, by the difference to one token out."""
        for batch in BATCHES[self.name]:

            def make(repeat: int, out: int, batch: int = batch) -> Work:
                return random_prompts(random.Random(f"{batch}-{repeat}-{out}"), [128] * batch), [out] * batch

            self.generate(make(1000, 16))
            first = statistics.median(self.seconds(make(r, 1)) for r in range(self.repeats))
            walls = [self.seconds(make(r, 256)) for r in range(self.repeats)]
            step = round((statistics.median(walls) - first) / 255 * 1e3, 4)
            row = {
                "row": "decode",
                "model": self.name,
                "batch": batch,
                "ms_per_step": step,
                "prefill_s": round(first, 4),
            }
            yield with_peer(row, f"decode {self.name} {batch} ms_per_step")

    def host(self) -> Iterator[dict[str, Any]]:
        """256 requests: the part of a decoding step in which the host does not wait for the device."""
        waits: list[tuple[float, float]] = []
        wait = Moment.wait

        def timed(moment: Moment) -> None:
            began = time.perf_counter()
            wait(moment)
            waits.append((began, time.perf_counter()))

        Moment.wait = timed  # type: ignore[method-assign]
        try:
            for repeat in range(self.repeats):
                self.generate((random_prompts(random.Random(f"host-{repeat}"), [128] * 256), [256] * 256))
        finally:
            Moment.wait = wait  # type: ignore[method-assign]
        last = waits[-200:]
        steps = [end - ended for (_, ended), (_, end) in pairwise(last)]
        works = [began - ended for (_, ended), (began, _) in pairwise(last)]
        yield {
            "row": "host",
            "model": self.name,
            "batch": 256,
            "ms_per_step": round(statistics.median(steps) * 1e3, 3),
            "host_ms_per_step": round(statistics.median(works) * 1e3, 3),
            "steps_that_were_awaited": sum(end - began > 1e-4 for began, end in last) / len(last),
        }

    def prefill8b(self) -> Iterator[dict[str, Any]]:
        """Prompts alone."""
        for count, length in ((1, 8192), (32, 2048)):

            def make(repeat: int, count: int = count, length: int = length) -> Work:
                tokens = random.Random(f"prefill-{count}-{repeat}")
                return random_prompts(tokens, [length] * count), [1] * count

            wall, walls, _ = self.time(make)
            row = {"row": f"prefill8b_{count}x{length}", "model": self.name, "wall_s": wall, "walls": walls}
            row["tok_s"] = round(count * length / wall)
            yield with_peer(row, f"{row['row']} tok_s")

    def prefix8b(self) -> Iterator[dict[str, Any]]:
        """256 requests that share 2048 tokens and have 128 of their own, 64 out."""

        def make(repeat: int) -> Work:
            rng = random.Random(f"prefix-{repeat}")
            [shared] = random_prompts(rng, [2048])
            return [shared + own for own in random_prompts(rng, [128] * 256)], [64] * 256

        wall, walls, _ = self.time(make)
        row = {"row": "prefix8b", "model": self.name, "wall_s": round(wall, 4), "walls": walls}
        yield with_peer(row, "prefix8b wall_s")

    def long8b(self) -> Iterator[dict[str, Any]]:
        """16 requests of 16384 tokens: the time of a decoding step, prompts cached."""
        prompts = random_prompts(random.Random("long"), [16384] * 16)
        self.generate((prompts, [1] * 16))
        first, last = (self.seconds((prompts, [n] * 16)) for n in (1, 129))
        row = {"row": "long8b", "model": self.name, "ms_per_step": round((last - first) / 128 * 1e3, 4)}
        yield with_peer(row, "long8b ms_per_step")

    def beside8b(self) -> Iterator[dict[str, Any]]:
        """64 streams of 200 tokens beside four prompts of 16,000: the gaps between the streams' tokens."""
        self.close()
        for longest in (0, 2048):
            yield {"row": "beside8b", "model": self.name, "threshold": longest} | asyncio.run(
                self._beside(longest)
            )

    async def _beside(self, longest: int) -> dict[str, float]:
        engine = AsyncLLM.from_engine_args(
            EngineArgs(
                model=str(self.folder),
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                max_model_len=17408,
                gpu_memory_utilization=0.85,
                long_prefill_token_threshold=longest,
            )
        )

        async def stream(name: str, prompt: list[int], num_tokens: int) -> list[float]:
            kind = RequestOutputKind.DELTA
            params = SamplingParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, output_kind=kind
            )
            times = [time.perf_counter()]
            async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
                times += [time.perf_counter()] * len(output.outputs[0].token_ids)
            assert len(times) == num_tokens + 1
            return times

        try:
            rng = random.Random(longest)
            await asyncio.gather(
                *(stream(f"w{i}", p, 8) for i, p in enumerate(random_prompts(rng, [64] * 64)))
            )
            prompts = random_prompts(rng, [128] * 64)
            streams = [asyncio.create_task(stream(f"s{i}", p, 200)) for i, p in enumerate(prompts)]
            await asyncio.sleep(0.5)
            others = random_prompts(rng, [16000] * 4)
            firsts = await asyncio.gather(*(stream(f"p{i}", p, 1) for i, p in enumerate(others)))
            gaps = sorted(b - a for times in await asyncio.gather(*streams) for a, b in pairwise(times[1:]))
        finally:
            await engine.shutdown()
        return {
            "gap_ms_p50": round(1e3 * gaps[len(gaps) // 2], 2),
            "gap_ms_p99": round(1e3 * gaps[len(gaps) * 99 // 100], 2),
            "gap_ms_most": round(1e3 * gaps[-1], 2),
            "last_prompt_s": round(max(times[1] - times[0] for times in firsts), 3),
        }


def random_prompts(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(MAX_ID) for _ in range(length)] for length in lengths]


def with_peer(row: dict[str, Any], key: str) -> dict[str, Any]:
    vllm, floor = PEER[key]
    return row | {"vllm": vllm, "floor": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--rows", default="", help="only these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quantization", help="round the weights, as the option of LLM")
    args = parser.parse_args()
    wanted = args.rows.split(",") if args.rows else []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models.split(","):
            path = Path(folder, name)
            path.mkdir()
            Path(path, "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
            rows = [row for row in ROWS[name] if not wanted or row in wanted]
            for row in Bench(name, path, args.repeats, args.quantization).run(rows):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
