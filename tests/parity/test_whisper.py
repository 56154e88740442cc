"""Whisper against transformers' class, through the whole engine, in float32."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.tiny_speech import (
    IDS,
    NO_TIMES,
    RATE,
    START,
    VOCAB,
    features,
    make_audio,
    make_oracle,
    save,
)

TOLERANCE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=-1, ignore_eos=True)
PROMPT = [START, IDS["<|en|>"], IDS["<|transcribe|>"], NO_TIMES]


@cache
def oracle_of():
    oracle = make_oracle()
    return oracle, save(oracle, Path(mkdtemp()))


def make_llm(**options):
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    return LLM(str(oracle_of()[1]), logprobs_mode="raw_logits", max_logprobs=-1, **exact | options)


def request_of(seed, seconds=1.5, prompt=PROMPT):
    audio = make_audio(seed, seconds)
    return {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (audio, RATE)}}


def make_requests(count=5):
    """Of several lengths, with prompts of several lengths."""
    more = [IDS["<|startofprev|>"], *range(40, 60), *PROMPT]
    return [request_of(i, 0.4 + 0.3 * i, more if i % 2 else PROMPT) for i in range(count)]


@torch.inference_mode()
def oracle_logits(ids, audio):
    oracle = oracle_of()[0]
    return oracle(input_features=features([audio]), decoder_input_ids=torch.tensor([ids])).logits[0].float()


def difference(requests, outputs):
    """The largest difference of logits, for the prompt's end and the tokens behind it."""
    worst = 0.0
    for request, output in zip(requests, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        audio = request["multi_modal_data"]["audio"][0]
        expected = oracle_logits([*output.prompt_token_ids, *tokens[:-1]], audio)[-len(tokens) :]
        ours = torch.tensor([[row[i].logprob for i in range(VOCAB)] for row in output.outputs[0].logprobs])
        worst = max(worst, (ours - expected).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 128, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 16},
        {"mm_encoder_cache_gb": 0.0, "enable_prefix_caching": False},
        {"block_size": 32},
    ],
    ids=["whole", "chunks_of_7", "small_steps", "few_blocks", "no_caches", "large_blocks"],
)
def test_logits(options):
    """Of several requests at once; then in another order, with prefix hits."""
    llm, requests = make_llm(**options), make_requests()
    first = llm.generate(requests, PARAMS, use_tqdm=False)
    assert difference(requests, first) <= TOLERANCE
    again = llm.generate(requests[::-1], PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again[::-1]] == [o.outputs[0].token_ids for o in first]
