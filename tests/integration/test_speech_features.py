"""Encoder-decoders with what else the engine has: captured steps, two ranks, steps in flight."""

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from tests.integration.test_cuda_graphs import repeats, shapes
from tests.tiny_speech import IDS, NO_TIMES, RATE, START, make_audio, make_oracle, save

__all__ = ["repeats", "shapes"]
PROMPT = [START, IDS["<|en|>"], IDS["<|transcribe|>"], NO_TIMES]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_oracle(), tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def requests():
    """Half of them with long prompts."""
    more = [IDS["<|startofprev|>"], *range(40, 80), *PROMPT]
    return [
        {"prompt_token_ids": more if i % 2 else PROMPT, "multi_modal_data": {"audio": (make_audio(i), RATE)}}
        for i in range(6)
    ]


def tokens(folder, requests, params=GREEDY, **options):
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    with LLM(str(folder), **exact | options) as llm:
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(folder, requests):
    return tokens(folder, requests, enforce_eager=True)


@pytest.mark.parametrize(
    "options", [{}, {"steps_in_flight": 2, "max_num_seqs": 3}], ids=["plain", "few_seats"]
)
def test_captured_equals_eager(folder, requests, expected, repeats, shapes, options):
    shapes.clear()
    assert tokens(folder, requests, **options) == expected
    assert any(not shape.chunks for shape in shapes), "decoding is captured"


def test_a_captured_step_reads_its_own_sources(folder, requests, expected, repeats, monkeypatch):
    """The twin: the lengths of other rows' sources change what is said."""
    batch = CUDAGraphs._batch

    def misplaced(steps, inputs, shape):
        made = batch(steps, inputs, shape)
        made.source_lens = (made.source_lens // 2).clamp(min=1)
        return made

    monkeypatch.setattr(CUDAGraphs, "_batch", misplaced)
    assert tokens(folder, requests) != expected


@pytest.mark.slow
def test_two_ranks(folder, requests, expected):
    assert tokens(folder, requests, tensor_parallel_size=2, cpu_threads=1) == expected


@pytest.mark.slow
def test_words_of_two_ranks(folder, requests):
    """The heads that tell when words were said are on one rank or the other."""
    params = SamplingParams(max_tokens=1, returns_alignment=True, skip_reading_prefix_cache=True)
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    told = []
    for size in (1, 2):
        with LLM(str(folder), tensor_parallel_size=size, cpu_threads=1, **exact) as llm:
            outputs = llm.generate(requests[:2], params, use_tqdm=False)
        told.append([np.frombuffer(output.pooled.data, np.float32) for output in outputs])
    for one, two in zip(*told, strict=True):
        assert len(one) == len(two) and np.abs(one - two).max() <= 1e-5
        assert np.abs(one.reshape(3, -1)).max(axis=1).min() > 1e-3
