"""Runs a model without the engine: lays out ForwardBatches by hand over a cache of its own, for parity tests.

The layout is deliberately unlike the engine's: every request takes its blocks from a shuffled pool, so that a
model or kernel that relies on neighbouring blocks gives wrong numbers here.
"""

import itertools
import random
from pathlib import Path

import torch

from octavo.config.cache import CacheConfig
from octavo.config.checkpoint import read_checkpoint
from octavo.config.engine import EngineConfig
from octavo.config.model import ModelConfig
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.scheduling import SchedulerConfig
from octavo.messages.kv import KVCacheSpec, StateKV
from octavo.runtime.batch import ForwardBatch, GivenEmbeds, GroupTables
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import load_model
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import get_platform


def engine_config(path: Path, device: str = "cpu", **model_options: object) -> EngineConfig:
    """A resolved config for the model at `path`, in float32 unless told otherwise."""
    checkpoint = read_checkpoint(path)
    load_format = "gguf" if checkpoint.format == "gguf" else "safetensors"
    exact = {"dtype": "float32", "activations": "float32"}
    options = exact | {"load_format": load_format, "max_model_len": 256} | model_options
    return EngineConfig(
        model=ModelConfig(model=str(path), **options),
        cache=CacheConfig(block_size=16, kv_cache_dtype="float32"),
        scheduler=SchedulerConfig(),
        parallel=ParallelConfig(device=device, cpu_threads=1),
        observability=ObservabilityConfig(),
        checkpoint=checkpoint,
    )


def load(
    path: Path, parallel: ParallelContext | None = None, device: str = "cpu", **model_options: object
) -> Model:
    """The model at `path`, on `device`."""
    config = engine_config(path, device, **model_options)
    return load_model(config, get_platform(device, 1), parallel or ParallelContext())


class Driver:
    """A model with a cache of `num_blocks` blocks and one table per request, used by all layers."""

    def __init__(self, model: Model, num_blocks: int = 128, block_size: int = 4) -> None:
        self.model = model
        self._device = device_of(model)
        self._block_size = block_size
        self._free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)
        self._tables: list[list[int]] = []
        self._lengths: list[int] = []
        self._caches = [
            _spoiled(layer.kv_spec, num_blocks, block_size, self._device) for layer in model.cache_layers
        ]

    def add(self) -> int:
        """Begin a request; returns its number."""
        self._tables.append([])
        self._lengths.append(0)
        return len(self._tables) - 1

    @torch.inference_mode()
    def step(self, work: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some requests: request → logits [tokens, vocab_size]."""
        with self._device:
            batch = self._batch(work)
        hidden = self.model.forward(batch)
        logits = (self.model.logits(hidden) if self.model.has_logits else hidden).cpu()
        logits = logits.split([len(tokens) for tokens in work.values()])
        return dict(zip(work, logits, strict=True))

    def _batch(self, work: dict[int, list[int]]) -> ForwardBatch:
        positions, slots = [], []
        for request, tokens in work.items():
            places = range(self._lengths[request], self._lengths[request] + len(tokens))
            self._lengths[request] += len(tokens)
            table = self._tables[request]
            while len(table) * self._block_size < self._lengths[request]:
                table.append(self._free.pop())
            positions += places
            slots += [table[p // self._block_size] * self._block_size + p % self._block_size for p in places]
        lengths = [self._lengths[request] for request in work]
        tables = [torch.tensor(self._tables[request], dtype=torch.int32) for request in work]
        counts = [len(tokens) for tokens in work.values()]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
        return ForwardBatch(
            input_ids=torch.tensor(list(itertools.chain(*work.values()))),
            positions=torch.tensor(positions),
            cu_q_lens=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32),
            kv_caches=self._caches,
            groups=[GroupTables(padded, torch.tensor(slots))],
            group_of_layer=[0] * len(self._caches),
            from_start=lengths == counts,
            longest_q=max(counts),
        )


def device_of(model: Model) -> torch.device:
    """Where a model computes."""
    found = (layer._backend.platform.device for layer in model.cache_layers if hasattr(layer, "_backend"))
    return next(found, torch.device("cpu"))  # a stage may have states alone


def _spoiled(spec: KVCacheSpec, num_blocks: int, block_size: int, device: torch.device) -> torch.Tensor:
    """A layer's cache of NaN."""
    if isinstance(spec, StateKV):
        states = torch.full((num_blocks, 1, spec.num_bytes // 4), torch.nan, device=device)
        return states.expand(-1, block_size, -1)
    shape = num_blocks, spec.halves, block_size, spec.num_kv_heads, spec.head_dim
    return torch.full(shape, torch.nan, dtype=getattr(torch, spec.dtype), device=device)


def prompt_logits(model: Model, prompts: list[list[int]], chunk: int = 0) -> list[torch.Tensor]:
    """Logits of every position of every prompt, in one ragged batch, or `chunk` tokens of each at a time."""
    driver = Driver(model)
    requests = {driver.add(): prompt for prompt in prompts}
    size = chunk or max(map(len, prompts))
    parts: dict[int, list[torch.Tensor]] = {request: [] for request in requests}
    for start in range(0, max(map(len, prompts)), size):
        work = {r: piece for r, prompt in requests.items() if (piece := prompt[start : start + size])}
        for request, logits in driver.step(work).items():
            parts[request].append(logits)
    return [torch.cat(part) for part in parts.values()]


@torch.inference_mode()
def given_logits(model: Model, prompt: list[int], values: torch.Tensor) -> torch.Tensor:
    """Logits of a prompt whose first tokens are given by the embeddings `values` alone."""
    driver, count = Driver(model), len(values)
    batch = driver._batch({driver.add(): [0] * count + prompt[count:]})
    batch.given_embeds = GivenEmbeds(torch.arange(count), values)
    return model.logits(model.forward(batch))


def greedy(model: Model, prompts: list[list[int]], count: int, num_blocks: int = 512) -> list[list[int]]:
    """The `count` most likely tokens after each prompt, all prompts in one batch."""
    driver = Driver(model, num_blocks)
    work = {driver.add(): prompt for prompt in prompts}
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        work = {r: [int(logits[-1].argmax())] for r, logits in driver.step(work).items()}
        for request, tokens in work.items():
            outputs[request] += tokens
    return outputs


def rank_main(
    rank: int, sizes: tuple[int, int, bool], folders: list[Path], prompts: list[list[int]], meeting: Path
) -> None:
    """One of tp x pp ranks, maybe with experts shared out: writes all logits to a file beside the meeting."""
    torch.set_num_threads(1)
    tp, pp, has_ep = sizes
    parallel = ParallelContext.create(
        rank, tp, f"file://{meeting}", torch.device("cpu"), pp_size=pp, has_ep=has_ep, timeout_s=60
    )
    logits = [prompt_logits(load(folder, parallel), prompts) for folder in folders]
    torch.save(logits, meeting.with_suffix(f".{rank}"))
    torch.distributed.barrier()  # what a stage has sent may be under way
    parallel.close()
