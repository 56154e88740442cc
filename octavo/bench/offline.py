"""`bench latency` and `bench throughput`: a model in this process, without HTTP.

Definitions and fields of the results are those of `vllm bench`.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.base.errors import ConfigError
from octavo.bench.data_options import DataOptions
from octavo.bench.generated import Sample
from octavo.bench.samples import load_samples
from octavo.config.args import EngineArgs
from octavo.config.option import option
from octavo.frontend.async_engine import AsyncLLM
from octavo.frontend.beam_search.params import BeamSearchParams
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.llm import LLM
from octavo.messages.sampling import SamplingParams

SHARES = (10, 25, 50, 75, 90, 99)
"""Percentiles that are told."""


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """One batch, again and again."""

    input_len: int = option(32, "Tokens of each prompt.")
    output_len: int = option(128, "Tokens that each is continued by.")
    batch_size: int = option(8, "Prompts at once.")
    n: int = option(1, "Sequences per prompt; with --use-beam-search, beams.")
    use_beam_search: bool = option(False, "Search with beams instead of sampling.")
    num_iters_warmup: int = option(10, "Rounds before the clock starts.")
    num_iters: int = option(30, "Rounds that are measured.")
    profile: bool = option(False, "Record a profile of one round (see --profiler-dir) instead of measuring.")
    disable_detokenize: bool = option(False, "Make no text of the tokens.")


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    """Many requests, all at once."""

    n: int = option(1, "Sequences per prompt.")
    num_warmups: int = option(0, "Requests before the clock starts.")
    async_engine: bool = option(False, "Use the asynchronous engine, with its core in a process of its own.")
    disable_detokenize: bool = option(False, "Make no text of the tokens.")


def measure_latency(args: EngineArgs, options: LatencyOptions) -> dict[str, Any]:
    """Return the seconds of each round. Raises ConfigError for lengths that the model cannot take."""
    if min(options.input_len, options.output_len, options.batch_size, options.num_iters) < 1:
        raise ConfigError("--input-len, --output-len, --batch-size and --num-iters must be at least 1.")
    with LLM.from_engine_args(args) as llm:
        size = llm.llm_engine.config.checkpoint.vocab_size
        shape = (options.batch_size, options.input_len)
        prompts = np.random.default_rng(0).integers(0, min(10000, size), size=shape).tolist()
        if options.profile:
            llm.start_profile()
            _round(llm, prompts, options)
            llm.stop_profile()
            return {}
        for _ in tqdm(range(options.num_iters_warmup), desc="Warmup iterations"):
            _round(llm, prompts, options)
        rounds = tqdm(range(options.num_iters), desc="Bench iterations")
        latencies = [_round(llm, prompts, options) for _ in rounds]
    return {
        "model_id": args.model,
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the percentiles that are told, by their names in JSON."""
    return {str(share): float(np.percentile(values, share)) for share in SHARES}


def _round(llm: LLM, prompts: list[list[int]], options: LatencyOptions) -> float:
    start = time.perf_counter()
    if options.use_beam_search:
        llm.beam_search(prompts, BeamSearchParams(options.n, options.output_len, ignore_eos=True))
    else:
        params = _params(options.n, options.output_len, detokenize=not options.disable_detokenize)
        llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def measure_throughput(args: EngineArgs, options: ThroughputOptions, data: DataOptions) -> dict[str, Any]:
    """Return requests and tokens per second over the whole run."""
    if options.async_engine:
        return asyncio.run(_measure_asynchronously(args, options, data))
    with LLM.from_engine_args(args) as llm:
        warm_ups, samples = _samples(options, data, llm.get_tokenizer())
        if warm_ups:
            llm.generate(_prompts(warm_ups), _all_params(warm_ups, options), use_tqdm=False)
        prompts, params = _prompts(samples), _all_params(samples, options)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - start
    return _result(args, outputs, elapsed)


async def _measure_asynchronously(
    args: EngineArgs, options: ThroughputOptions, data: DataOptions
) -> dict[str, Any]:
    engine = AsyncLLM.from_engine_args(args)
    await engine.start()
    try:
        warm_ups, samples = _samples(options, data, engine.tokenizer)

        async def answer(sample: Sample) -> RequestOutput:
            params = _params(options.n, sample.output_len, detokenize=not options.disable_detokenize)
            [prompt] = _prompts([sample])
            *_, last = [output async for output in engine.generate(prompt, params, sample.request_id)]
            return last

        await asyncio.gather(*map(answer, warm_ups))
        start = time.perf_counter()
        outputs = await asyncio.gather(*map(answer, samples))
        elapsed = time.perf_counter() - start
    finally:
        await engine.shutdown()
    return _result(args, outputs, elapsed)


def _samples(
    options: ThroughputOptions, data: DataOptions, tokenizer: Tokenizer | None
) -> tuple[list[Sample], list[Sample]]:
    if tokenizer is None:
        raise ConfigError("The benchmark counts tokens: leave out --skip-tokenizer-init.")
    warm_ups: list[Sample] = []
    if count := options.num_warmups:
        others = replace(data, num_prompts=count, seed=data.seed + 1, request_id_prefix="warm-up-")
        warm_ups = load_samples(others, tokenizer)
    return warm_ups, load_samples(data, tokenizer)


def _prompts(samples: Iterable[Sample]) -> list[Any]:
    return [sample.prompt for sample in samples]


def _all_params(samples: Iterable[Sample], options: ThroughputOptions) -> list[SamplingParams]:
    return [_params(options.n, s.output_len, detokenize=not options.disable_detokenize) for s in samples]


def _params(n: int, max_tokens: int, *, detokenize: bool) -> SamplingParams:
    return SamplingParams(n=n, temperature=1.0, ignore_eos=True, max_tokens=max_tokens, detokenize=detokenize)


def _result(args: EngineArgs, outputs: Sequence[RequestOutput], elapsed: float) -> dict[str, Any]:
    inputs = sum(len(output.prompt_token_ids or ()) for output in outputs)
    total = inputs + sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "model_id": args.model,
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": total,
        "total_output_tokens": total - inputs,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": (total - inputs) / elapsed,
    }
