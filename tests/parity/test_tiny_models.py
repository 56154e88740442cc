"""Every registered model against Hugging Face, in float32, on random checkpoints made here."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.runtime.models.interface import MODELS
from octavo.runtime.platforms.platform import get_platform
from tests.model_driver import Driver, greedy, load, prompt_logits
from tests.tiny_models import make_oracle, make_prompts, oracle_greedy, oracle_logits, save, tiny_config

TOLERANCE = 1e-4
NUM_TOKENS = 64
CHUNKS = [
    pytest.param(13, id="chunks_of_13"),
    pytest.param(0, id="whole", marks=pytest.mark.slow),
    pytest.param(1, id="token_by_token", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=MODELS.names())
def pair(request, tmp_path_factory) -> tuple[PreTrainedModel, Path]:
    """The oracle of one architecture, and its checkpoint."""
    oracle = make_oracle(tiny_config(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits(pair, chunk):
    oracle, folder = pair
    prompts = make_prompts(oracle.config.vocab_size)
    for logits, prompt in zip(prompt_logits(load(folder), prompts, chunk), prompts, strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.matrix(4)
def test_greedy_tokens(pair):
    oracle, folder = pair
    prompts = make_prompts(oracle.config.vocab_size)
    for prompt, output in zip(prompts, greedy(load(folder), prompts, NUM_TOKENS), strict=True):
        assert output == oracle_greedy(oracle, prompt, output)


@torch.inference_mode()
def test_a_decoding_step_is_recorded(pair):
    """Up to the hidden states of two requests it is kernels alone, which a CPU makes one call."""
    record = get_platform("cpu", 1).kernels.steps.record_calls
    if record is None:
        pytest.skip("the kernels of CPUs are missing")
    driver = Driver(load(pair[1]))
    batch = replace(driver._batch({driver.add(): [token] for token in (5, 6)}), num_singles=2)
    assert record(lambda: driver.model.forward(batch)) is not None


@pytest.mark.parametrize("tied", [True, False])
def test_heads(tmp_path, tied):
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"tie_word_embeddings": tied})
    prompts = make_prompts(oracle.config.vocab_size, (9,))
    logits = prompt_logits(load(save(oracle, tmp_path)), prompts)[0]
    torch.testing.assert_close(logits, oracle_logits(oracle, prompts[0]), atol=TOLERANCE, rtol=0)


EPS = {"bfloat16": 2**-7, "float16": 2**-10}


@pytest.mark.matrix(5)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", MODELS.names())
def test_narrow_weights(tmp_path, architecture, dtype):
    """Narrow weights are exact in float32: the oracle widens them while loading.

    But those of Falcon-H1 are rounded once more: its factors multiply them.
    """
    folder = save(make_oracle(tiny_config(architecture)).to(getattr(torch, dtype)), tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompts = make_prompts(oracle.config.vocab_size, (40,))
    logits, expected = prompt_logits(load(folder, dtype=dtype), prompts)[0], oracle_logits(oracle, prompts[0])
    limit = TOLERANCE if architecture != "FalconH1ForCausalLM" else float(expected.abs().max()) * EPS[dtype]
    torch.testing.assert_close(logits, expected, atol=limit, rtol=0)


def test_sharded_checkpoint(tmp_path):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    folder = save(oracle, tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    prompts = make_prompts(oracle.config.vocab_size, (9,))
    logits = prompt_logits(load(folder), prompts)[0]
    torch.testing.assert_close(logits, oracle_logits(oracle, prompts[0]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=["linear", "yarn", "yarn_factor", "dynamic"],
)
def test_ropes(tmp_path, rope):
    config = tiny_config("LlamaForCausalLM") | {"rope_parameters": rope | {"rope_theta": 1000.0}}
    oracle = make_oracle(config)
    prompts = make_prompts(oracle.config.vocab_size, (90,))
    logits = prompt_logits(load(save(oracle, tmp_path)), prompts)[0]
    torch.testing.assert_close(logits, oracle_logits(oracle, prompts[0]), atol=TOLERANCE, rtol=0)
