"""Experts in host memory: no number changes wherever they lie, and the most used get copies."""

import dataclasses

import pytest
import torch

from tests.triton_here import DEVICE

# isort: split
from octavo import LLM
from octavo.base.errors import ConfigError
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.loader import expert_cache
from octavo.runtime.loader.expert_cache import ExpertCache
from octavo.runtime.loader.loader import load_model
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.platforms.platform import CopyLane
from octavo.runtime.quantization import unquantized
from octavo.runtime.quantization.experts import HostExperts
from octavo.runtime.quantization.method import Storage
from tests.model_driver import engine_config, load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has the same on a GPU"),
]


class Lane(CopyLane):
    """The host's memory is the device's."""

    def host_memory(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target, source):
        raise AssertionError("no layer is copied")


class Device(CPUPlatform):
    """A CPU whose experts are multiplied by Triton's kernels."""

    def __init__(self):
        super().__init__(0, 1)
        experts = dataclasses.replace(
            self.kernels.experts, placed_experts=cuda_table().experts.placed_experts
        )
        self.kernels = dataclasses.replace(self.kernels, experts=experts)

    def copy_lane(self):
        return Lane()


@pytest.fixture
def folder(tmp_path):
    return save(make_oracle(tiny_config("Qwen3MoeForCausalLM")), tmp_path)


def load_with_cache(monkeypatch, folder, gb, layers=-1):
    monkeypatch.setattr(Storage, "has_experts_on_host", lambda storage, name: True)
    monkeypatch.setattr(unquantized, "WidenedExperts", HostExperts)
    config = engine_config(folder)
    parallel = dataclasses.replace(config.parallel, cpu_offload_experts=layers, expert_cache_gb=gb)
    return load_model(dataclasses.replace(config, parallel=parallel), Device(), ParallelContext())


ONE_EXPERT = 3 * 32 * 48 * 4 * 3 / 2**30  # in each of three layers


@pytest.mark.matrix()
@pytest.mark.parametrize("number", [0, 3, 8])
@pytest.mark.parametrize("lengths", [(1, 4), (90,)], ids=["few", "many"])
def test_no_number_changes(monkeypatch, folder, number, lengths):
    """By places, or all of them first; with copies of none (one at least), some and all."""
    prompts = make_prompts(131, lengths)
    expected = prompt_logits(load(folder), prompts, 1 if len(lengths) > 1 else 0)
    model = load_with_cache(monkeypatch, folder, number * ONE_EXPERT)
    cache = model.expert_cache
    assert cache._num_slots == max(1, number) and model.host_weight_bytes == round(8 * ONE_EXPERT * 2**30)
    for _ in range(2):
        for made, wanted in zip(
            prompt_logits(model, prompts, 1 if len(lengths) > 1 else 0), expected, strict=True
        ):
            torch.testing.assert_close(made, wanted, atol=1e-4, rtol=0)
        for _ in range(4 * expert_cache._INTERVAL):
            cache.rearrange()


def test_the_most_taken_get_copies(monkeypatch, folder):
    model = load_with_cache(monkeypatch, folder, 2 * ONE_EXPERT)
    cache: ExpertCache = model.expert_cache
    before = [owners.copy() for owners in cache._owners]
    assert all(owners.tolist() == [0, 1] for owners in before)
    for method in cache._methods:
        method.counts[:] = torch.tensor([0, 9, 1, 0, 0, 700, 0, 5])
    for _ in range(expert_cache._INTERVAL + 1):
        cache.rearrange()
    for method, owners in zip(cache._methods, cache._owners, strict=True):
        assert sorted(owners.tolist()) == [1, 5]
        for slot, expert in enumerate(owners.tolist()):
            assert torch.equal(method.copies[0][slot], method.matrices[0][expert])
        assert int(method.counts.sum()) == 0


def test_a_wrong_place_shows(monkeypatch, folder):
    prompts = make_prompts(131, (1, 4))
    model = load_with_cache(monkeypatch, folder, 3 * ONE_EXPERT)
    expected = prompt_logits(load(folder), prompts, 1)
    for method in model.expert_cache._methods:
        method.places.up.copy_(method.places.up.roll(1))
    made = prompt_logits(model, prompts, 1)
    assert max(float((x - y).abs().max()) for x, y in zip(made, expected, strict=True)) > 1e-2


def test_what_is_refused(folder):
    with pytest.raises(ConfigError, match="cpu_offload_gb and offload_group_size whole layers"):
        LLM(str(folder), cpu_offload_experts=-1, cpu_offload_gb=1.0)
    with pytest.raises(ConfigError, match="cpu_offload_experts must be at least -1"):
        LLM(str(folder), cpu_offload_experts=-2)
