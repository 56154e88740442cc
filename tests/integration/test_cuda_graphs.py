"""Decoding steps over fixed memory, as a GPU records them, give the tokens of ordinary steps (float32).

On CPU nothing can be recorded: the stand-in computes a step again where a GPU would repeat it, over the same
padded, static tensors.
"""

import gc
import json
import weakref

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.runtime.models.decoder import DecoderLayer
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.worker import prepare
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from octavo.runtime.worker.step_shapes import Shape, first_sizes, step_sizes
from tests.integration.test_invariance import params, prompts, tokens
from tests.tiny_models import tiny_config


@pytest.fixture
def repeats(monkeypatch):
    """Let CPU engines use recorded steps; returns how often one was repeated."""
    count = [0]

    def record(work):
        def repeat():
            count[0] += 1
            work()

        return repeat

    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda self: record)
    return count


@pytest.fixture
def shapes(monkeypatch):
    """The shapes of the steps that were computed or repeated."""
    seen, run = [], CUDAGraphs._run

    def noted(steps, shape, end):
        seen.append(shape)
        run(steps, shape, end)

    monkeypatch.setattr(CUDAGraphs, "_run", noted)
    return seen


@pytest.fixture
def eager(tiny_model, make_llm):
    """Tokens and logprobs of ordinary steps, all requests together."""
    return lambda work, wanted: tokens(make_llm(tiny_model, enforce_eager=True), work, wanted)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "options",
    [
        {"steps_in_flight": 1},
        {"steps_in_flight": 2},
        {"steps_in_flight": 2, "max_num_seqs": 5},
        {"steps_in_flight": 2, "num_gpu_blocks_override": 115, "block_size": 4, "max_model_len": 140},
    ],
    ids=["one_at_a_time", "overlapped", "few_seats", "preemption"],
)
def test_captured_equals_eager(tiny_model, make_llm, repeats, eager, options):
    work, wanted = prompts(12), params(12)
    llm = make_llm(tiny_model, **options)
    recorded = tokens(llm, work, wanted)
    assert repeats[0] > 20, "hardly a step was repeated"
    if "block_size" in options:
        assert llm.llm_engine.stats.num_preemptions > 0
    assert recorded == eager(work, wanted)


def test_prompts_join_a_running_batch(tiny_model, make_llm, repeats, shapes, eager):
    """Steps of single tokens and of chunks of prompts, side by side, are recorded as well."""
    work, wanted = prompts(24), params(24)
    for index, param in enumerate(wanted):
        param.max_tokens = 5 + 3 * (index % 5)
    llm = make_llm(tiny_model, max_num_batched_tokens=70, max_num_seqs=14, steps_in_flight=2)
    recorded = tokens(llm, work, wanted)
    mixed = {shape for shape in shapes if shape.singles and shape.chunks}
    assert {shape.singles for shape in mixed} == {8, 16}
    assert {shape.tokens for shape in mixed} == {64, 128}
    assert recorded == eager(work, wanted)


def test_what_needs_more_than_a_temperature(tiny_llama, make_llm, repeats):
    """Logprobs, penalties, truncation and prompt scores leave the recorded part and stay right."""
    work = prompts(4)
    wanted = [
        SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1, seed=3, presence_penalty=1.5, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1, seed=4, top_k=5, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.7, seed=5, logit_bias={7: 4.0}, ignore_eos=True),
    ]

    def everything(**options):
        outputs = make_llm(tiny_llama, **options).generate(work, wanted, use_tqdm=False)
        return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    recorded = everything(steps_in_flight=2)
    assert repeats[0] > 8
    assert recorded == everything(enforce_eager=True)


def test_memory_given_up_is_not_used_again(tiny_llama, make_llm, repeats):
    """Recordings refer to weights and cache: they end with them."""
    work, wanted = prompts(3), params(3)
    llm = make_llm(tiny_llama)
    expected = tokens(llm, work, wanted)
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens(llm, work, wanted) == expected


def test_trials_compute_a_layer_of_each_kind(tmp_path, make_llm, repeats, monkeypatch):
    """And the first and the last one, of sliding windows and none; steps of requests compute all."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("Gemma3ForCausalLM")))
    computed, forward = [], DecoderLayer.forward

    def note(layer, *inputs):
        computed.append(layer)
        return forward(layer, *inputs)

    monkeypatch.setattr(DecoderLayer, "forward", note)
    llm = make_llm(tmp_path, load_format="dummy")
    layers = list(llm.llm_engine.core.client._core._executor._worker.model.layers)
    tried = [layers.index(layer) for layer in computed]
    assert len(tried) > 40 and tried == [0, 2, 4, 5] * (len(tried) // 4)
    computed.clear()
    llm.generate({"prompt_token_ids": [1, 2, 3]}, params(1)[0], use_tqdm=False)
    assert len(computed) >= 12 and computed == layers * (len(computed) // 6)


def test_pauses_capture_what_a_start_leaves(tiny_llama, make_llm, monkeypatch):
    """A start captures the largest step and small ones. A pause ends with the first request."""
    captured = []
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda self: lambda work: captured.append(work) or work)
    llm = make_llm(tiny_llama, max_num_seqs=40)
    assert len(captured) == 5
    core = llm.llm_engine.core.client._core
    llm.llm_engine.add_request("one", {"prompt_token_ids": [1, 2, 3]}, params(1)[0])
    assert not core.use_pause() and len(captured) == 5
    llm.llm_engine.abort_request(["one"])
    while llm.llm_engine.has_unfinished_requests() or core.has_work():
        llm.llm_engine.step()
    before = len(captured)
    assert [core.use_pause() for _ in range(4)] == [True, True, False, False]
    assert len(captured) == before + 3 == 8
    llm.sleep()
    assert not core.use_pause()


def test_closing_gives_the_memory_back(tiny_llama, make_llm, repeats):
    """Graphs, cache and weights go with the engine, also while somebody holds its worker."""
    llm = make_llm(tiny_llama)
    worker = llm.llm_engine.core.client._core._executor._worker
    llm.generate({"prompt_token_ids": [1, 2, 3]}, params(1)[0], use_tqdm=False)
    kept = [weakref.ref(part) for part in (worker._runner, worker._cache, worker.model)]
    llm.shutdown()
    gc.collect()
    assert [part() for part in kept] == [None] * 3


def test_padding_touches_no_request(tiny_llama, make_llm, repeats):
    """A warm-up between two steps of requests, all rows padding, changes nothing of theirs."""
    work, wanted = prompts(3), params(3)
    expected = tokens(make_llm(tiny_llama, enforce_eager=True), work, wanted)
    llm = make_llm(tiny_llama)
    run = CUDAGraphs._sample

    def disturbed(steps, *step):
        steps.warm_up()
        return run(steps, *step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CUDAGraphs, "_sample", disturbed)
        assert tokens(llm, work, wanted) == expected


def test_single_rows_stand_longest_first():
    """Chunks keep their places behind all single rows, neighbours with a common start theirs."""
    starts, computed = np.array([0, 1, 2, 3, 4, 8]), np.array([3, 9, 1, 9, 50])
    work = prepare.Work(
        np.arange(5), computed, computed + np.diff(starts), starts, np.arange(4), np.arange(5), num_singles=4
    )
    steps = object.__new__(CUDAGraphs)
    assert steps._order(work, Shape(8, 8, 64)).tolist() == [2, 0, 3, 1, 8]
    assert steps._order(work, Shape(8, 8, 64, common_start=True)).tolist() == [0, 1, 2, 3, 8]


@pytest.mark.parametrize("most", [1, 2, 3, 8, 100, 256, 1000])
def test_sizes(most):
    sizes = step_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for count in range(1, most + 1):
        size = min(size for size in sizes if size >= count)
        assert size <= max(8, count + 7, count * 9 // 8)
    assert set(first_sizes(sizes)) <= set(sizes) and first_sizes(sizes)[0] == most


def test_common_beginnings_are_told(tiny_llama, make_llm, repeats, shapes, monkeypatch):
    """Steps of requests with a shared prefix have a shape of their own; others do not."""
    monkeypatch.setattr(prepare, "_COMMON_TOKENS", 64)
    monkeypatch.setattr(prepare, "_FEWEST_ALIKE", 4)
    work, wanted = prompts(6, shared=80), params(6)
    expected = tokens(make_llm(tiny_llama, enforce_eager=True, block_size=16), work, wanted)
    llm = make_llm(tiny_llama, block_size=16)
    assert tokens(llm, work, wanted) == expected
    assert any(shape.common_start for shape in shapes)
    shapes.clear()
    tokens(llm, prompts(6), wanted)
    assert shapes and not any(shape.common_start for shape in shapes)
