"""The largest steps, computed on nothing: any family of models can, and what they need is added up."""

import dataclasses

import pytest

from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.platforms.platform import get_platform
from octavo.runtime.worker import profile_run
from tests.model_driver import engine_config, load
from tests.tiny_models import make_oracle, save, tiny_config


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "OPTForCausalLM"])
def test_profile_run(tmp_path, monkeypatch, architecture):
    path = save(make_oracle(tiny_config(architecture)), tmp_path)
    config, sizes = engine_config(path), []
    few = dataclasses.replace(config.scheduler, max_num_seqs=3, max_num_batched_tokens=100)
    config = dataclasses.replace(config, scheduler=few)
    make_batch = profile_run._batch

    def noted(*args):
        batch = make_batch(*args)
        sizes.append((len(batch.kv_lens), len(batch.input_ids)))
        return batch

    def peak_bytes(self, work):
        work()
        return 1000

    monkeypatch.setattr(profile_run, "_batch", noted)
    platform = get_platform("cpu", 1)
    model = load(path)
    assert sum(profile_run.measure(model, config, platform)) == 0 + 8 * 4 * 257, "a CPU keeps nothing back"
    assert sizes == []
    monkeypatch.setattr(CPUPlatform, "peak_bytes", peak_bytes)
    assert sum(profile_run.measure(model, config, platform)) == 2000 + 8 * 4 * 257
    assert sizes == [(3, 102), (3, 3)], "all seats at once: the most tokens of a step, and decoding"
    eager = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, enforce_eager=True))
    assert sum(profile_run.measure(model, eager, platform)) == 1000 + 8 * 4 * 257
