"""Several GPUs of one host: what ranks compute is checked, then timed.

python benchmarks/record.py gpu-parallel python benchmarks/gpu_parallel.py [--gpus N] [--parts sums,tokens,…]

Prints one JSON line per row. Every part is a process with GPUs of its own and a limit of time; parts run side
by side, and one that fails or is late is a row, too. Weights and prompts are random; the length of every
output is checked. NVLink multicast stays off.

sums    kernels over the memory of other GPUs: against sums in the order of the ranks, to the bit, and NCCL
tokens  a small model in float32: one GPU, ranks, stages and experts give the same tokens, captured or not
long    a model with one key head, 32 requests of 16k tokens: steps of decoding, tokens that the cache holds
NAME    a model by some sizes: steps of decoding, throughput, share of what ranks say to each other
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "30b-a3b": _LLAMA
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "vocab_size": 151936,
    },
}
CONFIGS["long"] = CONFIGS["8b"] | {"num_key_value_heads": 1, "max_position_embeddings": 32768}
CONFIGS["235b-a22b"] = CONFIGS["30b-a3b"] | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
}
"""Of its 94 layers as many as fit."""
SMALL = _LLAMA | {
    "head_dim": 16,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 49153,
}
SMALL_EXPERTS = SMALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PARTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "8b tp1": ("8b", {}, 60),
    "8b tp2": ("8b", {"tensor_parallel_size": 2}, 60),
    "8b tp4": ("8b", {"tensor_parallel_size": 4}, 60),
    "8b pp2": ("8b", {"pipeline_parallel_size": 2}, 100),
    "8b pp2 tp2": ("8b", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 60),
    "8b dp2": ("8b", {"data_parallel_size": 2}, 60),
    "8b dp4": ("8b", {"data_parallel_size": 4}, 60),
    "long tp2": ("long", {"tensor_parallel_size": 2}, 90),
    "long tp2 dcp2": ("long", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, 90),
    "70b tp2": ("70b", {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.96}, 150),
    "70b tp4": ("70b", {"tensor_parallel_size": 4}, 200),
    "30b-a3b tp2": ("30b-a3b", {"tensor_parallel_size": 2}, 70),
    "30b-a3b ep2": ("30b-a3b", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, 70),
    "30b-a3b tp4": ("30b-a3b", {"tensor_parallel_size": 4}, 70),
    "30b-a3b ep4": ("30b-a3b", {"tensor_parallel_size": 4, "enable_expert_parallel": True}, 70),
    "30b-a3b dp2 ep2": ("30b-a3b", {"data_parallel_size": 2, "enable_expert_parallel": True}, 70),
    "235b-a22b tp4": ("235b-a22b", {"tensor_parallel_size": 4}, 90),
    "235b-a22b ep4": ("235b-a22b", {"tensor_parallel_size": 4, "enable_expert_parallel": True}, 90),
    "235b-a22b ep4 balanced": (
        "235b-a22b",
        {
            "tensor_parallel_size": 4,
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "eplb_config": {
                "num_redundant_experts": 16,
                "step_interval": 200,
                "window_size": 150,
                "log_balancedness": True,
            },
        },
        90,
    ),
    "235b-a22b dp4 ep4": ("235b-a22b", {"data_parallel_size": 4, "enable_expert_parallel": True}, 90),
}
"""What is timed: model, options, seconds at most."""
TOKENS: dict[str, dict[str, Any]] = {
    "one eager": {"enforce_eager": True},
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2 again": {"tensor_parallel_size": 2},
    "tp2 eager": {"tensor_parallel_size": 2, "enforce_eager": True},
    "pp2": {"pipeline_parallel_size": 2},
    "pp2 eager": {"pipeline_parallel_size": 2, "enforce_eager": True},
    "tp4": {"tensor_parallel_size": 4},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "ep2 eager": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True},
    "ep4": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    "dp2 ep2": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "dp2 ep2 again": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "dp2 ep2 eager": {"data_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True},
    "dp4 ep4": {"data_parallel_size": 4, "enable_expert_parallel": True},
    "dp2 tp2 ep4": {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
}
BATCHES = (1, 32, 128, 256, 512)
SIZES = [1 << power for power in range(13, 26)]
Row = dict[str, Any]
Key = tuple[str, str]
_ON_DEVICE = "kernel", "gpu_memcpy", "gpu_memset"
_GRAPHS: list[Callable[[], None]] = []


def say(row: Row) -> None:
    print(json.dumps(row), flush=True)


class Sums:
    """One rank's kernels over peer memory, and NCCL."""

    def __init__(self, rank: int, size: int, folder: str) -> None:
        from octavo.runtime.distributed import peer_setup
        from octavo.runtime.distributed.context import ParallelContext
        from octavo.runtime.distributed.peers import Limits, Peers
        from octavo.runtime.platforms.platform import get_platform

        platform = get_platform(f"cuda:{rank}", 4)
        self.rank, self.size, self.device = rank, size, platform.device
        self.norms, kernels = platform.kernels.norms, platform.kernels.peers
        context = ParallelContext.create(rank, size, f"file://{folder}/rendezvous", self.device)
        began = time.perf_counter()
        self.context = peer_setup.connect_peers(context, self.device, kernels, platform.graph_capture())
        connect_s = round(time.perf_counter() - began, 2)
        self.capture, self.group = platform.graph_capture(), self.context.tp
        if self.group.peers is None or kernels is None:
            raise SystemExit("The ranks do not see each other's memory.")
        memory, limits = self.group.peers.memory, self.group.peers.limits
        self.say({"row": "limits", "ranks": size, "connect_s": connect_s, **limits._asdict()})
        most = 1 << 62
        self.ways = {
            name: Peers(memory, kernels, Limits(shot, most)) for name, shot in (("one", most), ("two", 0))
        }

    def say(self, row: Row) -> None:
        if self.rank == 0:
            say(row)

    def seconds(self, work: Callable[[], Any]) -> float:
        from octavo.runtime.distributed.peer_setup import _seconds

        assert self.capture is not None
        return round(1e6 * _seconds(work, self.capture, self.group, _GRAPHS), 2)

    def compare(self, number: int, width: int = 4096) -> Row:
        """Sums of `number` bytes, bfloat16: the same bits as in the order of the ranks, and µs."""
        import torch
        from torch import distributed

        generator = torch.Generator(self.device).manual_seed(100 * number + self.rank)
        shape = number // 2 // width, width
        x = torch.randn(shape, device=self.device, generator=generator).bfloat16()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        distributed.all_gather(parts, x)
        exact = torch.zeros_like(x, dtype=torch.float32)
        for part in parts:
            exact += part
        exact = exact.bfloat16()
        residual, weight = exact.flip(1).contiguous(), 1 + exact[0] / 8
        normal, stream = self.norms.add_norm(exact, weight, 1e-5, residual)
        row: Row = {"row": "sums", "ranks": self.size, "bytes": number}
        for name, way in self.ways.items():
            if way.takes(x, by_rows=True):
                fused = way.add_norm(x, weight, 1e-5, residual)
                equal = torch.equal(way.all_reduce(x), exact) and torch.equal(fused[1], stream)
                row[f"{name}_equal"] = equal
                row[f"{name}_norm_off"] = float((fused[0].float() - normal.float()).abs().max())
                row[f"{name}_us"] = self.seconds(partial(way.all_reduce, x))
                row[f"{name}_norm_us"] = self.seconds(partial(way.add_norm, x, weight, 1e-5, residual))
        row["nccl_equal"] = bool(torch.equal(self.group.all_reduce_by_nccl(x.clone()), exact))
        row["nccl_us"] = self.seconds(partial(self.group.all_reduce_by_nccl, x.zero_()))
        row["nccl_norm_us"] = self.seconds(partial(self._both, x, weight, residual))
        return row

    def _both(self, x: Any, weight: Any, residual: Any) -> None:
        self.norms.add_norm(self.group.all_reduce_by_nccl(x), weight, 1e-5, residual)

    def replays(self, count: int = 500) -> Row:
        """Sums of many sizes in turn, captured and replayed: the same bits as launched one by one."""
        import torch

        generator = torch.Generator(self.device).manual_seed(self.rank)
        shapes = [(rows, 4096) for rows in (1, 3, 40, 200, 2)]
        inputs = [torch.randn(s, device=self.device, generator=generator).bfloat16() for s in shapes]
        made: list[Any] = []

        def all_of_them() -> None:
            made[:] = [way.all_reduce(x) for x in inputs for way in self.ways.values()]

        all_of_them()
        expected = [x.clone() for x in made]
        assert self.capture is not None
        replay, equal = self.capture(all_of_them), 0
        for _ in range(count):
            replay()
            equal += all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
        return {"row": "replays", "ranks": self.size, "equal": equal, "of": count}


def sums(rank: int, size: int, folder: str) -> None:
    """One rank: kernels, checked and timed."""
    rank_of = Sums(rank, size, folder)
    for number in SIZES:
        rank_of.say(rank_of.compare(number))
    rank_of.say(rank_of.replays())
    _GRAPHS.clear()  # NCCL waits for the graphs that it is in
    rank_of.context.close()


def write_small(folder: Path, config: dict[str, Any]) -> None:
    """A model whose numbers are large enough that every part of it shows in its tokens."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    def matrices(outputs: int, inputs: int, *names: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": draw(outputs, inputs, scale=1.6 * inputs**-0.5) for name in names}

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden, scale=0.3)}
    weights["model.norm.weight"] = 1 + draw(hidden, scale=0.2)
    for layer in range(config["num_hidden_layers"]):
        own = matrices(128, hidden, "self_attn.q_proj") | matrices(hidden, 128, "self_attn.o_proj")
        own |= matrices(64, hidden, "self_attn.k_proj", "self_attn.v_proj")
        count = config.get("num_experts", 0)
        if count:
            own |= matrices(count, hidden, "mlp.gate")
            own |= {f"self_attn.{name}_norm.weight": 1 + draw(16, scale=0.2) for name in "qk"}
        for mlp in [f"mlp.experts.{i}" for i in range(count)] or ["mlp"]:
            own |= matrices(inner, hidden, f"{mlp}.gate_proj", f"{mlp}.up_proj")
            own |= matrices(hidden, inner, f"{mlp}.down_proj")
        for name in ("input_layernorm", "post_attention_layernorm"):
            own[f"{name}.weight"] = 1 + draw(hidden, scale=0.2)
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in own.items()}
    save_file(weights, folder / "model.safetensors")
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")


def tokens(part: str, num_gpus: int, folder: Path) -> None:
    """The same requests by all sizes; the first is right."""
    write_small(folder, SMALL if part.startswith("tokens") else SMALL_EXPERTS)
    rng = random.Random(4)
    prompts = [[rng.randrange(SMALL["vocab_size"]) for _ in range(rng.randint(3, 200))] for _ in range(24)]
    first: list[Any] = []
    given = {"dtype": "float32", "num_gpu_blocks_override": 600, "max_model_len": 512}
    for name, options in (TOKENS if part.startswith("tokens") else EXPERTS).items():
        if ranks(options) not in (1, num_gpus) or (num_gpus > 2 and name == "one eager"):
            continue
        began = time.perf_counter()
        with engine(folder, **given, **options) as llm:
            started = time.perf_counter() - began
            found = [generate(llm, prompts, [40] * 24, temperature) for temperature in (0.0, 0.8)]
        first = first or found
        greedy, drawn = (
            sum(a == b for a, b in zip(*both, strict=True)) for both in zip(found, first, strict=True)
        )
        row = {"row": part, "sizes": name, "start_s": round(started, 1)}
        say(row | {"greedy_equal": greedy, "drawn_equal": drawn, "of": 24})


@contextlib.contextmanager
def engine(folder: Path, **options: Any):  # type: ignore[no-untyped-def]  # a generator of LLM
    from octavo import LLM

    given = {"gpu_memory_utilization": 0.9, "skip_tokenizer_init": True} | options
    llm = LLM(str(folder), **given)
    try:
        yield llm
    finally:
        llm.shutdown()


def generate(
    llm: Any, prompts: list[list[int]], lengths: list[int], temperature: float = 0.0
) -> list[list[int]]:
    from octavo import SamplingParams, TokensPrompt

    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True, detokenize=False)
        for i, n in enumerate(lengths)
    ]
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    if [len(ids) for ids in found] != lengths:
        raise SystemExit("An output has the wrong length.")
    return found


def speed(part: str, folder: Path) -> None:
    """Decode by batch, mixed requests, share of sums and gathers; and the tokens of two runs."""
    _, options, _ = PARTS[part]
    began = time.perf_counter()
    replicas = options.get("data_parallel_size", 1)
    given = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "profiler_dir": str(folder / "profiles"),
    }
    is_large = part.startswith("235b")
    with engine(folder, **given, **options) as llm:
        say({"row": "start", "sizes": part, "start_s": round(time.perf_counter() - began, 1)})
        clean(llm, part)
        shares = options.get("enable_expert_parallel", False)
        batches = BATCHES if replicas == 1 or shares else ()
        steps = {batch: decode(llm, part, batch) for batch in (batches[:3] if is_large else batches)}
        mixed(llm, part, 512 if is_large else 256 * replicas)
        if (replicas == 1 or shares) and len(options):
            stages = options.get("pipeline_parallel_size", 1)
            for batch in (1, 128) if stages == 1 else (1, 256):
                share(llm, part, batch, steps[batch], min(stages, batch))


def long(part: str, folder: Path, batch: int = 32, length: int = 16_384) -> None:
    """Long contexts: prompts once, then steps from the cache, by the difference of two lengths of outputs."""
    began = time.perf_counter()
    options = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": length + 512,
        "max_num_seqs": batch,
    }
    with engine(folder, **options, **PARTS[part][1]) as llm:
        say({"row": "start", "sizes": part, "start_s": round(time.perf_counter() - began, 1)})
        prompts, took = random_prompts(random.Random(3), [length] * batch), []
        for out in (1, 1, 33, 161):
            began = time.perf_counter()
            generate(llm, prompts, [out] * batch)
            took.append(time.perf_counter() - began)
        found = next(m for m in llm.get_metrics() if m.name.endswith("cache_config_info")).labels
        say(
            {
                "row": "long",
                "sizes": part,
                "batch": batch,
                "context": length,
                "prompts_s": round(took[0], 2),
                "ms_per_step": round(1e3 * (took[3] - took[2]) / 128, 3),
                "cache_tokens": int(found["num_gpu_blocks"]) * int(found["block_size"]),
            }
        )


def clean(llm: Any, part: str) -> None:
    """The same requests twice give the same tokens, of which there are several."""
    prompts = random_prompts(random.Random(1), [64] * 16)
    first, again = generate(llm, prompts, [32] * 16), generate(llm, prompts, [32] * 16)
    equal = sum(a == b for a, b in zip(first, again, strict=True))
    say(
        {
            "row": "again",
            "sizes": part,
            "equal": equal,
            "of": 16,
            "different_ids": len({i for ids in first for i in ids}),
        }
    )


def decode(llm: Any, part: str, batch: int, repeats: int = 2) -> float:
    """128 in, 129 out: the seconds of a step, by the difference to one token out."""

    def seconds(out: int, repeat: int) -> float:
        prompts = random_prompts(random.Random(f"{batch} {out} {repeat}"), [128] * batch)
        began = time.perf_counter()
        generate(llm, prompts, [out] * batch)
        return time.perf_counter() - began

    seconds(8, 100)
    first = statistics.median(seconds(1, repeat) for repeat in range(repeats))
    last = statistics.median(seconds(129, repeat) for repeat in range(repeats))
    step = (last - first) / 128
    say(
        {
            "row": "decode",
            "sizes": part,
            "batch": batch,
            "ms_per_step": round(1e3 * step, 3),
            "tok_s": round(batch / step),
        }
    )
    return step


def mixed(llm: Any, part: str, count: int) -> None:
    """Requests of log-normal lengths, greedy."""
    rng = random.Random(1)

    def length(most: int) -> int:
        return max(4, min(most, int(rng.lognormvariate(5.0, 1.0))))

    lengths = [(length(1024), length(512)) for _ in range(count)]
    walls = []
    for repeat in range(2):
        prompts = random_prompts(random.Random(f"mixed {repeat}"), [a for a, _ in lengths])
        began = time.perf_counter()
        generate(llm, prompts, [b for _, b in lengths])
        walls.append(round(time.perf_counter() - began, 3))
    out = sum(b for _, b in lengths)
    say(
        {
            "row": "mixed",
            "sizes": part,
            "requests": count,
            "out_tok": out,
            "walls": walls,
            "out_tok_s": round(out / min(walls)),
        }
    )


def share(llm: Any, part: str, batch: int, step_s: float, num_parts: int) -> None:
    """What part of the first rank's kernels sums and gathers are; medians, as some wait for the profiler.

    step_s: of the batch, which is computed in `num_parts`
    bubble: share of each rank's time without a kernel of the model, by steps from first to last request
    idle:   the same of the profiled steps alone
    alone:  share of the profiled steps' time in which nothing else runs than sums and gathers, by rank
    """
    prompts = random_prompts(random.Random(f"share {batch}"), [128] * batch)
    generate(llm, prompts, [4] * batch)
    counts = {"delay_iterations": 8, "max_iterations": 10}
    llm.collective_rpc("start_profile", kwargs={"prefix": f"b{batch}", **counts})
    generate(llm, prompts, [32] * batch)
    paths = [path for path in llm.collective_rpc("stop_profile") if path]
    (by_name, took, spoken), *others = map(kernels, paths)
    busy_us = [(sum(t.values()) - sum(s.values())) / 10 for _, t, s in ((by_name, took, spoken), *others)]
    say(
        {
            "row": "share",
            "sizes": part,
            "batch": batch,
            "kernels_ms_per_step": round(sum(took.values()) / 1e4, 3),
            "spoken_share": round(sum(spoken.values()) / max(sum(took.values()), 1e-9), 4),
            "bubble": [round(1 - 1e-6 * us * num_parts / step_s, 3) for us in busy_us],
            "idle": [round(idle(path), 3) for path in paths],
            "alone": [round(alone(path), 3) for path in paths],
            "spoken_us_each": {f"{k[0][:30]} {k[1]}": statistics.median(by_name[k]) for k in spoken},
        }
    )


def kernels(path: str) -> tuple[dict[Key, list[float]], dict[Key, float], dict[Key, float]]:
    """The times of a rank's kernels in µs, by name and grid; their sums; those of what ranks say."""
    by_name: dict[Key, list[float]] = {}
    for event in json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("cat") == "kernel":
            key = event["name"], str(event["args"].get("grid"))
            by_name.setdefault(key, []).append(event["dur"])
    took = {key: statistics.median(times) * len(times) for key, times in by_name.items()}
    return by_name, took, {key: us for key, us in took.items() if is_spoken(key[0])}


def is_spoken(kernel: str) -> bool:
    """Return True if ranks speak to each other by it."""
    return "nccl" in kernel.lower() or "_peer_" in kernel


def alone(path: str) -> float:
    """The share of the time from a rank's first to its last kernel in which only what ranks say runs."""
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in events if event.get("cat") in _ON_DEVICE]
    others = [event for event in events if not is_spoken(event["name"])]
    first, last = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    return (covered_us(events) - covered_us(others)) / (last - first)


def covered_us(events: list[dict[str, Any]]) -> float:
    """The time in which at least one of them runs."""
    end = total = 0.0
    for start, took in sorted((event["ts"], event["dur"]) for event in events):
        total += max(0.0, start + took - max(start, end))
        end = max(end, start + took)
    return total


def idle(path: str, least_us: float = 15.0) -> float:
    """The share of the time from a rank's first to its last kernel of the model in gaps between these."""
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    own = [e for e in events if e.get("cat") in _ON_DEVICE and "nccl" not in e["name"].lower()]
    times = sorted((e["ts"], e["ts"] + e["dur"]) for e in own)
    end, gaps_us = times[0][1], 0.0
    for start, until in times:
        gaps_us += start - end if start - end > least_us else 0.0
        end = max(end, until)
    return gaps_us / (times[-1][1] - times[0][0])


def random_prompts(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(100_000) for _ in range(length)] for length in lengths]


def run_part(part: str, num_gpus: int, folder: Path) -> None:
    """In a process of its own."""
    if part.startswith("sums"):
        import torch.multiprocessing

        torch.multiprocessing.spawn(sums, (num_gpus, str(folder)), num_gpus)  # type: ignore[no-untyped-call]
    elif part.split(maxsplit=1)[0] in ("tokens", "experts"):
        tokens(part, num_gpus, folder)
    else:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[PARTS[part][0]]), encoding="utf-8")
        (long if part.startswith("long") else speed)(part, folder)


def ranks(options: dict[str, Any]) -> int:
    """How many GPUs these options take."""
    count = 1
    for kind in ("tensor", "pipeline", "data"):
        count *= options.get(f"{kind}_parallel_size", 1)
    return count


class Running(NamedTuple):
    """A part in a process of its own, on some of the GPUs."""

    part: str
    gpus: list[int]
    child: subprocess.Popen[bytes]
    folder: tempfile.TemporaryDirectory[str]
    began: float
    until: float

    @classmethod
    def start(cls, part: str, gpus: list[int], limit: float) -> "Running":
        folder = tempfile.TemporaryDirectory()
        command = [
            sys.executable,
            __file__,
            "--part",
            part,
            "--gpus",
            str(len(gpus)),
            "--folder",
            folder.name,
        ]
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        child = subprocess.Popen(command, env=os.environ | MULTICAST_OFF | seen, start_new_session=True)
        now = time.perf_counter()
        return cls(part, gpus, child, folder, now, now + limit)

    def is_over(self) -> bool:
        """End it when its time is over; say so if it failed."""
        now = time.perf_counter()
        if self.child.poll() is None and now < self.until:
            return False
        if self.child.poll() is None:
            for number, wait_s in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0.0)):  # stacks, then the end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.child.pid, number)
                time.sleep(wait_s)
        code, took = self.child.wait(), round(now - self.began, 1)
        print(f"{self.part}: {took} s, ended with {code}", file=sys.stderr, flush=True)
        if code:
            say({"row": "failed", "part": self.part, "code": code, "seconds": took})
        self.folder.cleanup()
        return True


def run_all(parts: dict[str, tuple[int, int]], num_gpus: int, until: float) -> None:
    """Run parts side by side, each on GPUs of its own. parts: GPUs and seconds at most"""
    free, running = list(range(num_gpus)), list[Running]()
    waiting = [part for part, (count, _) in parts.items() if count <= num_gpus]
    while waiting or running:
        for one in [one for one in running if one.is_over()]:
            running.remove(one)
            free += one.gpus
        for part in [part for part in waiting if parts[part][0] <= len(free)][:1]:
            waiting.remove(part)
            count, limit = parts[part]
            left = until - time.perf_counter()
            if left < 20:
                say({"row": "left out", "part": part})
                continue
            gpus, free = free[:count], free[count:]
            running.append(Running.start(part, gpus, min(limit, left)))
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0, help="so many; 0 = all")
    parser.add_argument("--parts", default="", help="only these, with commas between")
    parser.add_argument("--seconds", type=int, default=560, help="no part may end later")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args.gpus, Path(args.folder))
        return
    num_gpus = args.gpus or sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    known = {
        f"{part} {count}": (count, limit)
        for part, limit in (("sums", 60), ("tokens", 120), ("experts", 90))
        for count in (2, 4)
    }
    known |= {name: (ranks(options), limit) for name, (_, options, limit) in PARTS.items()}
    wanted = args.parts.split(",") if args.parts else list(known)
    run_all({part: known[part] for part in wanted}, num_gpus, time.perf_counter() + args.seconds)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
