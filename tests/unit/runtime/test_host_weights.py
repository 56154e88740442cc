"""Weights in host memory: which layers, how they travel, and that no number changes. A lane of the CPU's."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from octavo.base.errors import ConfigError, Unsupported
from octavo.config.parallel import ParallelConfig
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader import host_weights, read_ahead
from octavo.runtime.loader.host_weights import HostWeights, choose_layers, layer_bytes
from octavo.runtime.loader.loader import load_model
from octavo.runtime.loader.read_ahead import ReadAhead
from octavo.runtime.loader.safetensors import read_tensors
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.platforms.platform import CopyLane
from octavo.runtime.quantization import unquantized
from tests.model_driver import engine_config, load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

NUM_LAYERS = 7


class EarlyLane(CopyLane):
    """Copies at once: a buffer that is still in use is spoilt."""

    def __init__(self):
        self.memory, self.copies = [], []

    def host_memory(self, num_bytes):
        self.memory.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.memory[-1]

    def copy(self, target, source):
        self.copies.append(next(i for i, memory in enumerate(self.memory) if memory is source))
        target.copy_(source)
        return lambda: None


class LateLane(EarlyLane):
    """Copies when the copy is waited for: until then the buffer holds no numbers."""

    def copy(self, target, source):
        super().copy(target, source)
        target.fill_(255)
        return lambda: target.copy_(source)


@pytest.fixture(autouse=True)
def methods_of_a_gpu(monkeypatch):
    """Weights multiplied where they lie at the time."""
    monkeypatch.setattr(unquantized, "WidenedLinear", unquantized.DenseLinear)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "GPT2LMHeadModel"])
def folder(request, tmp_path_factory) -> Path:
    config = tiny_config(request.param)
    config["n_layer" if "n_layer" in config else "num_hidden_layers"] = NUM_LAYERS
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"] * NUM_LAYERS)[:NUM_LAYERS]
    return save(make_oracle(config), tmp_path_factory.mktemp(request.param))


def logits(model, index=1):
    return prompt_logits(model, [make_prompts(100)[index]])[0]


def choose(sizes, **options):
    return sorted(choose_layers(ParallelConfig(device="cuda", **options), sizes))


def test_groups_keep_their_last_layers_outside():
    sizes = [1] * 24
    assert choose(sizes, offload_group_size=8, offload_num_in_group=2) == [6, 7, 14, 15, 22, 23]
    assert choose(sizes, offload_group_size=1) == list(range(24))
    assert choose(sizes[:7], offload_group_size=4) == [3]


def test_bytes_are_made_up_by_layers_evenly_between_the_others():
    sizes = [1 << 29] * 8
    assert choose(sizes, cpu_offload_gb=0.1) == [7]
    assert choose(sizes, cpu_offload_gb=1.0) == [3, 7]
    assert choose(sizes, cpu_offload_gb=1.1) == [1, 4, 7]
    assert choose(sizes, cpu_offload_gb=99.0) == list(range(8))


def test_more_than_the_host_has_is_refused(monkeypatch):
    monkeypatch.setattr(host_weights.cpu, "free_bytes", lambda: 3 << 30)
    assert choose([1 << 30] * 8, cpu_offload_gb=3.0) == [1, 4, 7]
    with pytest.raises(ConfigError, match="4 layers take 4 GiB of host memory per GPU; 3 GiB are free"):
        choose([1 << 30] * 8, cpu_offload_gb=3.5)


@pytest.mark.parametrize("lane_class", [EarlyLane, LateLane])
@pytest.mark.parametrize("layers", [range(NUM_LAYERS), (2, 5), (0, 1, 6)])
@pytest.mark.parametrize("num_ahead", [0, 1, 20])
def test_no_number_changes(folder, layers, num_ahead, lane_class):
    expected = logits(load(folder))
    model, lane = load(folder), lane_class()
    weights = HostWeights(model, list(layers), num_ahead, torch.device("cpu"), lane)
    for _ in range(3):
        assert torch.equal(logits(model), expected)
    assert lane.copies == list(range(len(layers))) * 3
    assert len(weights._buffers) == min(num_ahead + 1, len(layers))


def test_an_interrupted_step_leaves_the_next_one_right(folder):
    expected = logits(load(folder))
    model = load(folder)
    HostWeights(model, range(NUM_LAYERS), 2, torch.device("cpu"), LateLane())
    broken = model.layers[4].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    broken.remove()
    assert torch.equal(logits(model), expected)


class LanedPlatform(CPUPlatform):
    """A CPU that seems to have a memory of its own."""

    def copy_lane(self):
        return LateLane()


def test_loading_puts_the_chosen_layers_there(folder):
    config = engine_config(folder)
    platform = LanedPlatform(0, 1)
    plain = load_model(config, platform, ParallelContext())
    sizes = layer_bytes(plain)
    parallel = ParallelConfig(device="cpu", cpu_offload_gb=2.5 * sizes[0] / 2**30)
    config = dataclasses.replace(config, parallel=parallel)
    model = load_model(config, platform, ParallelContext())
    assert plain.host_weight_bytes == 0
    assert model.host_weight_bytes == 3 * sizes[0]
    assert model.weight_bytes == plain.weight_bytes
    assert torch.equal(logits(model), logits(plain))
    kept = {p.data.untyped_storage().data_ptr() for layer in (1, 3, 6) for p in matrices(model, layer)}
    assert len(kept) == 1, "one tensor of buffers"


def matrices(model, layer):
    return host_weights._matrices(model.layers[layer])


def test_what_cannot_be_kept_outside_says_so(folder):
    config = dataclasses.replace(engine_config(folder), parallel=ParallelConfig(offload_group_size=2))
    packed = dataclasses.replace(config, model=dataclasses.replace(config.model, load_format="gguf"))
    foreign = dataclasses.replace(config, model=dataclasses.replace(config.model, model_impl="transformers"))
    platform = LanedPlatform(0, 1)
    for asked, text in (
        (packed, "Packed weights stay on the GPU"),
        (foreign, "needs its weights on the GPU"),
    ):
        with pytest.raises(Unsupported, match=text):
            load_model(asked, platform, ParallelContext())


def test_reading_ahead_reads_everything_once(tmp_path, monkeypatch):
    monkeypatch.setattr(read_ahead, "_PIECE", 1000)
    sizes = [2500, 0, 70_000]
    files = [tmp_path / str(size) for size in sizes]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))

    def characters_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    before = characters_read()
    with ReadAhead(files) as ahead:
        ahead._thread.join(5)
    assert sum(sizes) <= characters_read() - before < sum(sizes) + 10_000


def test_reading_ahead_ends_with_the_reader(tmp_path, folder):
    pipe = tmp_path / "model.safetensors"
    pipe.write_bytes((folder / "model.safetensors").read_bytes())
    tensors = read_tensors(tmp_path, is_ahead=True)
    next(tensors)
    tensors.close()
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())
    with ReadAhead([tmp_path / "gone"]) as ahead:
        ahead._thread.join(5)


def test_loading_with_reading_ahead_gives_the_same(folder):
    model = load(folder, safetensors_load_strategy="prefetch")
    assert torch.equal(logits(model), logits(load(folder)))
