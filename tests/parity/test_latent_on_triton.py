"""DeepSeek as a GPU computes it, in Triton's interpreter: latent attention in both forms."""

from dataclasses import replace

import pytest
import torch

from tests.triton_here import HAS_GPU  # skips where there is no Triton

# isort: split
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.layers.latent_attention import LatentHeads
from octavo.runtime.loader.loader import load_model
from octavo.runtime.platforms.platform import get_platform
from tests.model_driver import Driver, engine_config, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, save, tiny_config

pytestmark = pytest.mark.skipif(HAS_GPU, reason="there tests/gpu/test_models_on_gpu.py does it")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The oracle, the model over Triton's attention, and how many tokens took the plain form so far."""
    oracle, plain = make_oracle(tiny_config("DeepseekV3ForCausalLM")), []
    attention = cuda_table().attention

    def count(prompts, out):
        plain.append(len(out))
        attention.latent_prompts(prompts, out)

    platform = get_platform("cpu", 1)
    platform.kernels = replace(platform.kernels, attention=replace(attention, latent_prompts=count))
    folder = save(oracle, tmp_path_factory.mktemp("deepseek"))
    model = load_model(engine_config(folder), platform, ParallelContext())
    for module in model.modules():
        if isinstance(module, LatentHeads):
            module._on_cpu = False
    return oracle, model, plain


@pytest.mark.matrix
@pytest.mark.parametrize(("chunk", "num_plain"), [(0, 52), (13, 25)], ids=["whole", "chunks"])
def test_prompts(loaded, chunk, num_plain):
    """Whole prompts are plain in all three layers; later chunks of one are not."""
    oracle, model, plain = loaded
    plain.clear()
    prompts = make_prompts(oracle.config.vocab_size, (11, 40, 1))
    logits = prompt_logits(model, prompts, chunk)
    assert plain == [num_plain] * 3
    for actual, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(actual, oracle_logits(oracle, prompt), atol=1e-5, rtol=0)


def test_a_prompt_beside_decoding(loaded, monkeypatch):
    oracle, model, plain = loaded
    old, new = make_prompts(oracle.config.vocab_size, (30, 9))
    driver = Driver(model)
    requests = driver.add(), driver.add()
    driver.step({requests[0]: old})
    make_batch = driver._batch
    told = {"num_singles": 1, "from_start": True}
    monkeypatch.setattr(driver, "_batch", lambda work: replace(make_batch(work), **told))
    plain.clear()
    logits = driver.step({requests[0]: [5], requests[1]: new})
    assert plain == [len(new)] * 3
    expected = oracle_logits(oracle, [*old, 5])[-1:], oracle_logits(oracle, new)
    for actual, right in zip(logits.values(), expected, strict=True):
        torch.testing.assert_close(actual, right, atol=1e-5, rtol=0)
