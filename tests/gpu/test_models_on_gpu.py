"""Every registered model on a GPU against Hugging Face on CPU: float32 closely, bf16 within its rounding."""

import copy

import pytest
import torch

from octavo.runtime.models.interface import MODELS
from tests.gguf_models import MIXED, write_gguf
from tests.model_driver import greedy, load, prompt_logits
from tests.parity.test_config_variants import VARIANTS
from tests.parity.test_tiny_gguf import CONFIGS
from tests.tiny_models import (
    make_oracle,
    make_prompts,
    oracle_greedy,
    oracle_logits,
    save,
    tiny_config,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=MODELS.names())
def pair(request, tmp_path_factory):
    """The oracle of one architecture, and its checkpoint."""
    oracle = make_oracle(tiny_config(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("chunk", [0, 1, 13], ids=["whole", "token_by_token", "chunks_of_13"])
def test_logits_on_gpu(pair, chunk):
    oracle, folder = pair
    prompts = make_prompts(oracle.config.vocab_size)
    logits = prompt_logits(load(folder, device="cuda"), prompts, chunk)
    for actual, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(actual, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)


def test_greedy_tokens_on_gpu(pair):
    oracle, folder = pair
    prompts = make_prompts(oracle.config.vocab_size)
    outputs = greedy(load(folder, device="cuda"), prompts, 64)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == oracle_greedy(oracle, prompt, output)


def test_bf16_on_gpu(pair):
    """As close to float32 as Hugging Face's own bf16 arithmetic on the same weights is, or nearly."""
    oracle, folder = pair
    prompt = make_prompts(oracle.config.vocab_size, (40,))[0]
    exact = oracle_logits(oracle, prompt)
    rounded = oracle_logits(copy.deepcopy(oracle).bfloat16(), prompt)
    ours = prompt_logits(load(folder, device="cuda", dtype="bfloat16"), [prompt])[0].float()
    errors = [(x - exact).norm(dim=-1) / exact.norm(dim=-1) for x in (ours, rounded)]
    # Rounding changes which experts some tokens take: there their median counts.
    off, spread = (x.median() if "oe" in folder.name or "Llama4" in folder.name else x.norm() for x in errors)
    assert off <= 1.5 * spread + 1e-3


@pytest.mark.parametrize(("architecture", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_variants_on_gpu(tmp_path, architecture, changes):
    """What configs switch on and off within a family."""
    oracle = make_oracle(tiny_config(architecture) | changes)
    prompts = make_prompts(oracle.config.vocab_size, (11, 90))
    for logits, prompt in zip(
        prompt_logits(load(save(oracle, tmp_path), device="cuda"), prompts, 13), prompts, strict=True
    ):
        torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_gguf_on_gpu(tmp_path, architecture):
    """Blocks of several types, unpacked on the device."""
    oracle = make_oracle(tiny_config(architecture) | CONFIGS[architecture])
    path = write_gguf(oracle, tmp_path / "tiny.gguf", MIXED, "Q4_1")
    prompts = make_prompts(oracle.config.vocab_size)
    for logits, prompt in zip(prompt_logits(load(path, device="cuda"), prompts), prompts, strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
