"""A step whose last hidden states are wanted of some tokens gives those of the whole step (float32)."""

import pytest
import torch

from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.worker import replayer
from tests.integration.conftest import make_llm, tiny_gemma3, tiny_llama, tiny_model
from tests.integration.test_invariance import params, prompts, tokens
from tests.model_driver import Driver, load
from tests.tiny_models import make_oracle, save, tiny_config

__all__ = ["make_llm", "tiny_gemma3", "tiny_llama", "tiny_model"]


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "GPTNeoXForCausalLM", "CohereForCausalLM", "Olmo2ForCausalLM"],
    ids=["serial", "parallel", "parallel_one_norm", "normalised"],
)
def test_rows_of_the_last_layer(architecture, tmp_path):
    model = load(save(make_oracle(tiny_config(architecture)), tmp_path))
    driver = Driver(model)
    requests = {driver.add(): list(range(3, 14)), driver.add(): [5, 6, 7]}
    batch = driver._batch(requests)
    with torch.inference_mode():
        everything = model.forward(batch)
        batch.wanted = torch.tensor([10, 13])
        torch.testing.assert_close(model.forward(batch), everything[[10, 13]], rtol=1e-6, atol=1e-6)
        batch.wanted = torch.empty(0, dtype=torch.int64)
        assert model.forward(batch).shape == (0, everything.shape[1])


def test_long_steps_want_what_they_sample(tiny_model, make_llm, monkeypatch):
    work, wanted = prompts(8), params(8)
    expected = tokens(make_llm(tiny_model), work, wanted)
    monkeypatch.setattr(CPUPlatform, "is_batch_invariant", False)
    monkeypatch.setattr(replayer, "MAX_CAPTURED_TOKENS", 8)
    assert tokens(make_llm(tiny_model, max_num_batched_tokens=50), work, wanted) == expected
