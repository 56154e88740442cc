"""Sleep on a GPU: memory is free meanwhile, no file is read for the way back, and no token changes."""

import gc
import shutil

import pytest
import torch

from octavo import LLM
from octavo.runtime.worker.host_copy import HostCopy
from tests.integration.test_invariance import params, prompts, tokens
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"enforce_eager": True}),
        ("LlamaForCausalLM", {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"}),
        ("LlamaForCausalLM", {"offload_group_size": 1, "enforce_eager": True}),
        ("Gemma3ForCausalLM", {"enable_lora": True}),
        ("MixtralForCausalLM", {"dtype": "bfloat16"}),
        ("DeepseekV3ForCausalLM", {}),
        ("Qwen2ForCausalLM", {"model_impl": "transformers"}),
    ],
)
def test_no_token_changes(architecture, options, make_llm, tmp_path):
    model = save(make_oracle(tiny_config(architecture)), tmp_path / "model")
    llm, work, wanted = make_llm(model, **options), prompts(6), params(6)
    expected = tokens(llm, work, wanted)
    shutil.rmtree(model)
    for _ in range(2):
        llm.sleep(1)
        assert llm.collective_rpc("describe")[0]["weight_bytes"] == 0
        llm.wake_up()
        assert tokens(llm, work, wanted) == expected


def test_memory_is_free_meanwhile(make_llm, tmp_path):
    sizes = {"vocab_size": 32768, "hidden_size": 1536}
    config = tiny_config("LlamaForCausalLM") | sizes
    model = save(make_oracle(config), tmp_path / "model")
    gc.collect()
    before = torch.cuda.memory_reserved()
    llm = make_llm(model, num_gpu_blocks_override=2000)
    [report] = llm.collective_rpc("describe")
    whole = report["weight_bytes"] + report["kv_cache_bytes"]
    llm.sleep(1)
    assert torch.cuda.memory_reserved() - before < whole / 4
    llm.wake_up(["weights"])
    llm.wake_up()
    assert llm.collective_rpc("describe")[0] == report


def test_without_room_on_the_host_files_are_read(tiny_llama, make_llm, monkeypatch):
    llm, work, wanted = make_llm(tiny_llama), prompts(3), params(3)
    expected = tokens(llm, work, wanted)
    monkeypatch.setattr(HostCopy, "_copy", lambda *_: False)
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm, work, wanted) == expected


def test_other_weights_sleep_too(tiny_llama, make_llm, tmp_path):
    """Weights that came into the running engine are those that wake up."""
    other = save(make_oracle(tiny_config("LlamaForCausalLM"), 1), tmp_path / "other")
    llm, work, wanted = make_llm(tiny_llama), prompts(3), params(3)
    llm.sleep(1)
    llm.wake_up()
    llm.update_weights_from_disk(str(other))
    expected = tokens(llm, work, wanted)
    shutil.rmtree(other)
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm, work, wanted) == expected


def test_a_byte_that_is_lost_shows(tiny_llama, make_llm, monkeypatch):
    llm, work, wanted = make_llm(tiny_llama), prompts(3), params(3)
    expected = tokens(llm, work, wanted)

    def lossy(copy, find=HostCopy._pieces):
        (here, there), *others = find(copy)
        return [(here, torch.zeros_like(there)), *others]

    monkeypatch.setattr(HostCopy, "_pieces", lossy)
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm, work, wanted) != expected


def test_a_drafter_sleeps_beside_its_model(tiny_llama, make_llm):
    drafts = {"model": str(tiny_llama), "num_speculative_tokens": 2}
    llm: LLM = make_llm(tiny_llama, speculative_config=drafts)
    work, wanted = prompts(3), params(3)
    expected = tokens(llm, work, wanted)
    llm.sleep(1)
    llm.wake_up()
    assert tokens(llm, work, wanted) == expected
