"""Encoder-decoders beside transformers, in turn, with the same weights and sources.

    python benchmarks/record.py cpu-text-to-text python benchmarks/cpu_text_to_text.py [--alone]

"t5_v1.1-small" has the sizes of that model and of FLAN-T5 small, "bart-base" those of BART. Random weights in
bf16; sources of 64 tokens. One JSON line per model and batch: milliseconds per decoding step, by the median
rounds of few and of many tokens; --alone leaves transformers out.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from octavo import LLM, SamplingParams

THREADS, SOURCE, SHORT, LONG = 2, 64, 8, 40
T5 = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
MODELS: dict[str, Callable[[], Any]] = {
    "t5_v1.1-small": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=32128,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
            **T5,
        )
    ),
    "bart-base": lambda: BartForConditionalGeneration(
        BartConfig(d_model=768, encoder_layers=6, decoder_layers=6, forced_bos_token_id=None)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(THREADS)
    for name in asked.models:
        torch.manual_seed(0)
        model = MODELS[name]().to(torch.bfloat16).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            options = {"skip_tokenizer_init": True, "dtype": "bfloat16", "num_gpu_blocks_override": 2048}
            llm = LLM(folder, cpu_threads=THREADS, max_model_len=256, **options)
            for batch in asked.batches:
                sources = torch.randint(5, 30000, (batch, SOURCE))
                row = {"model": name, "batch": batch, "octavo_ms": step_ms(ours(llm, sources), asked.rounds)}
                if not asked.alone:
                    row["transformers_ms"] = step_ms(theirs(model, sources), asked.rounds)
                    row["ratio"] = float(f"{row['transformers_ms'] / row['octavo_ms']:.3g}")
                print(json.dumps(row), flush=True)
            llm.shutdown()


def step_ms(write: Callable[[int], None], rounds: int) -> float:
    """Milliseconds of a step: what LONG tokens take more than SHORT ones."""
    times: dict[int, list[float]] = {SHORT: [], LONG: []}
    for _ in range(rounds + 1):
        for length, seconds in times.items():
            begun = time.perf_counter()
            write(length)
            seconds.append(time.perf_counter() - begun)
    short, long = (statistics.median(seconds[1:]) for seconds in times.values())
    return float(f"{1000 * (long - short) / (LONG - SHORT):.3g}")


def ours(llm: LLM, sources: torch.Tensor) -> Callable[[int], None]:
    requests = [
        {"encoder_prompt": {"prompt_token_ids": ids}, "decoder_prompt": {"prompt_token_ids": [0]}}
        for ids in sources.tolist()
    ]

    def write(length: int) -> None:
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate(requests, params, use_tqdm=False)

    return write


def theirs(model: Any, sources: torch.Tensor) -> Callable[[int], None]:
    @torch.inference_mode()
    def write(length: int) -> None:
        model.generate(input_ids=sources, max_new_tokens=length, min_new_tokens=length, do_sample=False)

    return write


if __name__ == "__main__":
    main()
