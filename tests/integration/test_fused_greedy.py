"""Steps of requests that all want the greedy token: the model finds it, and makes no logits."""

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.runtime.models.decoder import Decoder

PROMPTS = [{"prompt_token_ids": [5 + i, 9, 2 * i + 1]} for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OTHERS = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=6, ignore_eos=True),
]


@pytest.fixture
def llm(tiny_llama):
    llm = LLM(str(tiny_llama), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64)
    yield llm
    llm.shutdown()


@pytest.fixture
def calls(monkeypatch):
    """How many rows were asked for, step by step; the model answers as a kernel would, but by torch.

    So a first decoding step asks twice: its recording ends before the head when this is refused.
    """
    calls = []

    def greedy(model, hidden):
        calls.append(len(hidden))
        logits = model.logits(hidden)
        return logits.argmax(dim=1), logits.amax(dim=1)

    monkeypatch.setattr(Decoder, "greedy", greedy)
    return calls


def tokens(llm, params):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_the_same_tokens(llm, monkeypatch, calls):
    found = tokens(llm, GREEDY)
    assert calls == [4] * 7
    monkeypatch.undo()
    llm.reset_prefix_cache()
    assert tokens(llm, GREEDY) == found


@pytest.mark.parametrize("other", OTHERS, ids=["temperature", "logprobs", "penalty"])
def test_who_wants_more_gets_logits(llm, calls, other):
    """In one step for all: a batch is never divided."""
    before = tokens(llm, GREEDY)
    calls.clear()
    mixed = tokens(llm, [GREEDY, GREEDY, GREEDY, other])
    assert mixed[:3] == before[:3]
    assert not calls


def test_prompts_may_want_logprobs(llm, calls):
    scored = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=6, ignore_eos=True)
    assert tokens(llm, GREEDY) == tokens(llm, [GREEDY, GREEDY, GREEDY, scored])
    assert calls == [4] * 13


def test_a_row_that_is_no_number_fails_alone(llm, monkeypatch):
    def greedy(model, hidden):
        peaks = torch.zeros(len(hidden))
        if len(hidden) == len(PROMPTS):
            peaks[2] = float("nan")
        return torch.arange(len(hidden)), peaks

    monkeypatch.setattr(Decoder, "greedy", greedy)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length", "error", "length"]
