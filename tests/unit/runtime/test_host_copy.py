"""Weights in host memory: what loading filled is found, goes and comes back; without room nothing changes."""

import pytest
import torch

from octavo.config import EngineArgs, resolve
from octavo.runtime.distributed.context import ALONE
from octavo.runtime.loader.loader import load_model
from octavo.runtime.loader.snapshot import loaded_tensors
from octavo.runtime.platforms.platform import get_platform
from octavo.runtime.worker import host_copy
from octavo.runtime.worker.host_copy import HostCopy
from tests.tiny_models import make_oracle, save, tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 7))
    layers[1].weight.data = layers[0].weight.data[:7, :200].t().contiguous().t()  # not contiguous
    layers.register_buffer("same", layers[0].weight.data[3:5])  # the same memory again
    return layers.requires_grad_(False)


@pytest.mark.parametrize("chunk_bytes", [1 << 12, 1 << 28])
def test_the_bytes_come_back(model, monkeypatch, chunk_bytes):
    monkeypatch.setattr(host_copy, "_CHUNK_BYTES", chunk_bytes)
    before = [tensor.clone() for tensor in loaded_tensors(model)]
    copy = HostCopy(CPU)
    for _ in range(2):
        assert copy.give_up(model, None) and copy.is_away
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in loaded_tensors(model))
        copy.bring_back()
        assert not copy.is_away
        assert all(map(torch.equal, loaded_tensors(model), before))
        assert model.same.data_ptr() == model[0].weight[3:5].data_ptr()
    copy.forget()
    model[0].weight.fill_(1)  # other weights are copied again
    assert copy.give_up(model, None)
    copy.bring_back()
    assert (model.same == 1).all()


def test_without_room_nothing_changes(model, monkeypatch):
    monkeypatch.setattr(host_copy, "free_bytes", lambda: 1 << 20)
    copy = HostCopy(CPU)
    assert not copy.give_up(model, None) and not copy.is_away
    assert model[0](torch.ones(300)).shape == (500,)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"quantization": "int8_per_channel_weight_only"}),
        ("MixtralForCausalLM", {"quantization": "int8"}),
        ("DeepseekV3ForCausalLM", {}),
        ("Qwen2ForCausalLM", {"model_impl": "transformers"}),
    ],
)
def test_all_weights_are_found(architecture, options, tmp_path):
    """Of octavo's layers, packed or not, and of transformers' code."""
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    config = resolve(EngineArgs(model=str(folder), skip_tokenizer_init=True, device="cpu", **options))
    model = load_model(config, get_platform("cpu", 1), ALONE)
    storages = (tensor.untyped_storage() for tensor in loaded_tensors(model))
    found = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(found.values()) >= model.weight_bytes > 0
