"""Grammars with steps in flight over the real runner, in every executor: the tokens of one step at a time.

The vocabulary of the tiny models is taken for ASCII, so that no tokenizer is needed.
"""

import re

import msgspec
import pytest

from octavo.config import EngineArgs, resolve
from octavo.engine.core import EngineCore
from octavo.engine.executor import make_executor
from octavo.engine.structured.guidance import GuidanceBackend
from octavo.messages.request import FinishReason
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import SchedulerOutput
from octavo.messages.structured import Constraint, StructuredOutputsParams, Vocabulary
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.sampling.sampler import Kind
from octavo.runtime.worker import cuda_graphs
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from octavo.runtime.worker.model_runner import ModelRunner
from octavo.runtime.worker.pinned_ring import PinnedRing
from tests.fakes import fake_request

pytestmark = pytest.mark.matrix(3)

VOCAB_SIZE, END = 131, 130
ASCII = Vocabulary([bytes([i]) for i in range(128)] + [b"<a>", b"<b>", b"</s>"], [128, 129, END], [END])
FORM = "[a-z]{3}( [0-9]{2,5}){1,4}"
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "logit_bias": {ord("3"): 4.0}},
]


@pytest.fixture
def run(tmp_path):
    """(tokens, finish reason, logprobs) of 12 requests, two of three with a form; and the steps' flags."""
    file = tmp_path / "ascii"
    file.write_bytes(msgspec.msgpack.encode(ASCII))
    grammar = GuidanceBackend.translate(StructuredOutputsParams(regex=FORM))
    constraint = Constraint(grammar, str(file), "guidance")

    def run(folder, num_kinds=4, **options):
        defaults = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 400}
        config = resolve(EngineArgs(model=str(folder), **(defaults | options)))
        core = EngineCore(config, make_executor(config))
        core.start()
        try:
            for index in range(12):
                sampling = SamplingParams(max_tokens=20, **KINDS[index % num_kinds])
                form = {"constraint": constraint} if index % 3 else {}
                core.add(
                    fake_request(f"r{index}", [index + 1] * (3 + 5 * index), 20, seed=index, eos=[END],
                                 sampling=sampling, **form)
                )  # fmt: skip
            return drain(core)
        finally:
            core.close()

    return run


def drain(core):
    results = {}
    while core.has_work():
        for output in core.step().outputs:
            tokens, logprobs, _ = results.get(output.request_id, ([], [], None))
            logprobs = logprobs + (output.logprobs or [])
            results[output.request_id] = tokens + output.new_token_ids, logprobs, output.finish_reason
    return results


@pytest.fixture
def flags(monkeypatch):
    """Of each step that was executed here: whether its masks followed."""
    seen, execute = [], ModelRunner.execute

    def noted(runner, step: SchedulerOutput):
        seen.append(step.masks_follow)
        return execute(runner, step)

    monkeypatch.setattr(ModelRunner, "execute", noted)
    return seen


def test_overlapped_and_captured_steps_choose_the_same(tiny_model, run, flags, monkeypatch):
    expected = run(tiny_model, enforce_eager=True)
    assert not any(flags)
    for index in range(12):
        tokens, logprobs, reason = expected[f"r{index}"]
        assert len(logprobs) == (len(tokens) if index % 4 == 2 else 0)
        if index % 3 and reason is FinishReason.STOP:
            assert re.fullmatch(FORM, bytes(t for t in tokens if t != END).decode())
    assert run(tiny_model, steps_in_flight=2, enforce_eager=True) == expected
    assert sum(flags) > 10
    tight = {
        "num_gpu_blocks_override": 60,
        "block_size": 4,
        "max_model_len": 100,
        "max_num_batched_tokens": 40,
    }
    assert run(tiny_model, steps_in_flight=3, **tight) == expected
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda self: lambda work: work)
    assert run(tiny_model, steps_in_flight=2) == expected


@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "beyond_the_limit"])
def test_plain_rows_are_replayed_until_their_masks_come(tiny_model, run, flags, monkeypatch, is_captured):
    expected = run(tiny_model, num_kinds=2, enforce_eager=True)
    kinds, choose = set(), CUDAGraphs._choose

    def noted(graphs, key, rows, masks):
        kinds.add((key[1].kind, masks is None, key[0].chunks > 0))
        return choose(graphs, key, rows, masks)

    monkeypatch.setattr(CUDAGraphs, "_choose", noted)
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda self: lambda work: work)
    if not is_captured:
        monkeypatch.setattr(cuda_graphs, "_MAX_GRAPHS", 0)
    assert run(tiny_model, num_kinds=2, steps_in_flight=2) == expected
    assert sum(flags) > 10
    assert {(Kind.WHOLE, False, False), (Kind.WHOLE, False, True)} <= kinds


def test_masks_that_are_lost_show(tiny_model, run, monkeypatch):
    """What the tests above compare depends on every mask."""
    expected = run(tiny_model, num_kinds=2, enforce_eager=True)
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda self: lambda work: work)
    monkeypatch.setattr(PinnedRing, "give_masks", lambda ring, rows, numbers: None)
    found = run(tiny_model, num_kinds=2, steps_in_flight=2)
    assert found != expected
    assert {name for name in expected if found[name] != expected[name]} <= {
        f"r{i}" for i in range(12) if i % 3
    }


@pytest.mark.slow
def test_masks_reach_every_rank(tiny_llama, run):
    expected = run(tiny_llama)
    tokens = {name: result[0] for name, result in expected.items()}
    two = run(tiny_llama, steps_in_flight=2, tensor_parallel_size=2, cpu_threads=1)
    assert {name: result[0] for name, result in two.items()} == tokens
