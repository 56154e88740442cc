"""The two real GGUF models on a GPU, against transformers on CPU: logits, greedy text, bfloat16's error."""

from copy import deepcopy

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.model_driver import load, prompt_logits
from tests.parity.test_gguf_checkpoints import (
    GEMMA3_PROMPTS,
    SMOLLM2_PROMPTS,
    TOLERANCE,
    load_oracle,
)
from tests.tiny_models import oracle_greedy, oracle_logits

pytestmark = pytest.mark.gpu
NUM_TOKENS = 32


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real(request, tmp_path_factory):
    """(file, oracle, prompts)"""
    path = request.getfixturevalue(f"{request.param}_path")
    prompts = SMOLLM2_PROMPTS if request.param == "smollm2" else GEMMA3_PROMPTS
    return path, load_oracle(path, tmp_path_factory.mktemp(request.param)), prompts


def test_real_logits_on_gpu(real):
    path, oracle, prompts = real
    model = load(path, device="cuda", max_model_len=2048)
    for logits, prompt in zip(prompt_logits(model, prompts[:4]), prompts, strict=False):
        torch.testing.assert_close(logits, oracle_logits(oracle, prompt), atol=TOLERANCE, rtol=0)


def test_real_text_on_gpu(real):
    """Recorded steps, two in flight, the engine and its tokenizer; then once more from the prefix cache."""
    path, oracle, prompts = real
    options = {"dtype": "float32", "max_model_len": 1024, "gpu_memory_utilization": 0.3}
    wanted = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(path), **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, wanted, use_tqdm=False), strict=True):
                [completion] = output.outputs
                tokens = list(completion.token_ids)
                assert tokens == oracle_greedy(oracle, prompt, tokens)
                assert completion.text


def test_bfloat16_is_as_near_as_in_transformers(real):
    """Of the 20 most likely tokens at each place of a text, against float32: logprobs through the engine."""
    path, oracle, prompts = real
    wanted = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
    with LLM(str(path), dtype="bfloat16", max_model_len=1024, gpu_memory_utilization=0.3) as llm:
        outputs = llm.generate(prompts, wanted, use_tqdm=False)
    rounded = deepcopy(oracle).bfloat16()
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        [completion] = output.outputs
        text = prompt + list(completion.token_ids)[:-1]
        exact, near = (oracle_logits(m, text)[len(prompt) - 1 :].log_softmax(-1) for m in (oracle, rounded))
        for place, found in enumerate(completion.logprobs):
            ids = list(found)
            given = torch.tensor([found[i].logprob for i in ids])
            ours.append((given - exact[place, ids]).abs().mean())
            theirs.append((near[place, ids] - exact[place, ids]).abs().mean())
    assert torch.stack(ours).mean() < 1.15 * torch.stack(theirs).mean()
