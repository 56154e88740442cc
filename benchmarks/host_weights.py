"""What weights in host memory cost on a GPU: ms per decoding step, beside the time that the bus needs.

    python benchmarks/record.py host-weights python -m benchmarks.host_weights

Eight layers of Llama 3.1 8B (436 MB each, bfloat16, random), one request. Prints one JSON line per setting:
bytes in host memory, bytes taken of the GPU, ms per step, and the floor: the bytes that pass the bus in a
step by its measured speed. Tokens must be those of the engine that keeps everything on the GPU.
"""

import json
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu import CONFIGS
from octavo import LLM, SamplingParams, TokensPrompt

SETTINGS = [
    {},
    {"offload_group_size": 8},
    {"offload_group_size": 4},
    {"cpu_offload_gb": 0.8, "offload_prefetch_step": 0},
    {"cpu_offload_gb": 0.8, "enforce_eager": True},
    {"offload_group_size": 1, "offload_prefetch_step": 2},
]
PROMPT = TokensPrompt(prompt_token_ids=list(range(100, 164)))
SHORT, LONG = 8, 40


def main():
    with tempfile.TemporaryDirectory() as folder:
        config = CONFIGS["llama-3.1-8b"] | {"num_hidden_layers": 8}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        bytes_per_ms = bus_speed()
        expected = None
        for options in SETTINGS:
            figures, tokens = measure(folder, options)
            expected = expected or tokens
            floor_ms = round(figures["host_bytes"] / bytes_per_ms, 2)
            same = tokens == expected
            print(json.dumps({**options, **figures, "floor_ms": floor_ms, "same_tokens": same}), flush=True)
            assert same, "weights in host memory changed a token"


def bus_speed():
    """Bytes per ms from page-locked memory."""
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return source.nbytes / min(times)


def measure(folder, options):
    before = torch.cuda.memory_allocated()
    with LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28,
        **options,
    ) as llm:
        [report] = llm.collective_rpc("describe")
        device_bytes = torch.cuda.memory_allocated() - before
        generate(llm, SHORT)
        times = [(generate(llm, SHORT)[0], generate(llm, LONG)[0]) for _ in range(3)]
        step_ms = min(1000 * (long - short) / (LONG - SHORT) for short, long in times)
        tokens = generate(llm, LONG)[1]
    figures = {"host_bytes": report["host_weight_bytes"], "device_bytes": device_bytes}
    return figures | {"step_ms": round(step_ms, 2)}, tokens


def generate(llm, count):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=count, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return time.perf_counter() - start, list(output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
