"""Users' own logits processors and listed logprobs in the sampler; who fails, and who does not."""

import dataclasses
import re

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.messages.sampling import SamplingParams
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.sampling.logprobs import score_candidates
from octavo.runtime.sampling.processors import LogitBias, Processor
from octavo.runtime.sampling.request_functions import AdapterLogitsProcessor, load_processors
from octavo.runtime.sampling.sampler import PROCESSORS, Sampler, with_users
from tests.fakes import fake_config
from tests.sampling_reference import Case

VOCAB = 61
CPU = torch.device("cpu")


def logits_of(row, position=0):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(100 * row + position)) * 3


def sample(sampler, cases):
    """One step for the requests in slots 0 …"""
    logits = torch.stack([logits_of(row, len(case.outputs)) for row, case in enumerate(cases)])
    host = sampler.sample(logits, range(len(cases)), [len(case.outputs) for case in cases]).to_host()
    for case, token_id in zip(cases, host.token_ids, strict=True):
        case.outputs.append(token_id)
    return host


def make(cases, processors=PROCESSORS):
    sampler = Sampler(VOCAB, 8, CPU, TORCH_SAMPLING, processors=processors)
    for slot, case in enumerate(cases):
        sampler.add(slot, case.message(str(slot)))
    return sampler


def greedy(**params):
    return Case(SamplingParams(temperature=0, **params))


def test_functions_see_their_request_and_are_chained():
    seen = []

    def two(output_ids, logits):
        seen.append(list(output_ids))
        return logits * 0

    def three(prompt_ids, output_ids, logits):
        assert (prompt_ids, float(logits.abs().max())) == ([1, 2, 3], 0.0)
        logits[40 + len(output_ids)] = 1
        return logits

    cases = [greedy(), greedy(logits_processors=[two, three])]
    sampler = make(cases)
    results = [sample(sampler, cases) for _ in range(3)]
    assert [host.token_ids[1] for host in results] == [40, 41, 42]
    assert seen == [[], [40], [40, 41]]
    assert [host.token_ids[0] for host in results] == [int(logits_of(0, i).argmax()) for i in range(3)]
    sampler.add(1, cases[1].message())  # again after a preemption
    assert sample(sampler, cases).token_ids[1] == 43


def test_functions_come_before_the_penalties():
    case = greedy(logits_processors=[lambda ids, x: x * 0 + 5], frequency_penalty=2, repetition_penalty=2)
    sampler = make([case])
    assert [sample(sampler, [case]).token_ids[0] for _ in range(3)] == [0, 4, 5]  # 1, 2, 3 are in the prompt


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda ids, x: 1 / 0, "ZeroDivisionError"),
        (lambda ids, x: None, "it must return a tensor of 61 logits, not None"),
        (lambda ids, x: x[:5], r"not a tensor of shape \(5,\)"),
        (lambda ids, x: [1.0] * 61, "not a list"),
        (lambda x: x, "TypeError"),
    ],
    ids=range(5),
)
def test_a_failing_function_ends_its_request_alone(function, text):
    cases = [greedy(logits_processors=[function]), greedy(), greedy(logits_processors=[lambda ids, x: -x])]
    host = sample(make(cases), cases)
    assert host.errors.keys() == {0} and re.search(text, host.errors[0])
    assert host.token_ids[1:] == [int(logits_of(1).argmax()), int(logits_of(2).argmin())]


def test_a_fault_leaves_with_its_request():
    cases = [greedy(logits_processors=[lambda ids, x: None])]
    sampler = make(cases)
    assert sample(sampler, cases).errors[0]
    sampler.add(0, greedy().message())
    assert sample(sampler, [greedy()]).errors == {}


class Broken(Processor):
    """Raises in the method that the request names."""

    def is_active(self, params):
        self._fail(params, "is_active")
        return params.extra_args is not None

    def add(self, slot, request):
        self.params = request.sampling
        self._fail(self.params, "add")

    def remove(self, slot):
        self._fail(self.params, "remove")

    def apply(self, logits, batch):
        self._fail(self.params, "apply")

    def observe(self, batch, token_ids):
        self._fail(self.params, "observe")

    def _fail(self, params, method):
        if (params.extra_args or {}).get("fail") == method:
            raise RuntimeError(f"in {method}")


@pytest.mark.parametrize("method", ["is_active", "add", "apply", "observe", "remove"])
def test_a_broken_class_ends_only_the_requests_it_serves(method):
    cases = [greedy(), greedy(extra_args={"fail": method})]
    sampler = make(cases, with_users([Broken]))
    host = sample(sampler, cases)
    expected = f"The logits processor Broken failed: RuntimeError: in {method}"
    assert host.errors == ({} if method == "remove" else {1: expected})
    assert host.token_ids[0] == int(logits_of(0).argmax())
    sampler.remove(1)
    sampler.add(1, greedy().message())
    assert sample(sampler, [greedy(), greedy()]).errors == {}


class Favourite(AdapterLogitsProcessor):
    """As in vLLM's example: a function for requests that name a token."""

    def new_req_logits_processor(self, params):
        favourite = (params.extra_args or {}).get("favourite")
        if favourite is None:
            return None

        def favour(output_ids, logits):
            logits[favourite] = 1000
            return logits

        return favour


class Prepared(Favourite):
    """Its constructor is vLLM's too."""

    def __init__(self, vllm_config, device, is_pin_memory):
        super().__init__(vllm_config, device, is_pin_memory)
        assert vllm_config.model_config.model and device == CPU and is_pin_memory is False


def load(*names):
    config = fake_config()
    model = dataclasses.replace(config.model, logits_processors=list(names))
    return load_processors(dataclasses.replace(config, model=model))


@pytest.mark.parametrize("kind", [Favourite, Prepared])
def test_adapter(kind):
    cases = [greedy(), greedy(extra_args={"favourite": 17})]
    host = sample(make(cases, with_users(load(f"{__name__}:{kind.__name__}"))), cases)
    assert host.token_ids == [int(logits_of(0).argmax()), 17]


def test_users_processors_stand_where_vllm_has_them():
    order = with_users([Broken])
    assert order.index(LogitBias) < order.index(Broken) < len(order) - 1
    assert [step for step in order if step is not Broken] == list(PROCESSORS)


def test_loading():
    name = f"{__name__}:Broken"
    assert load(name, "octavo.runtime.sampling.processors:LogitBias") == [Broken, LogitBias]
    for wrong in ("octavo.nowhere:Class", f"{__name__}:Nobody"):
        with pytest.raises(ConfigError, match=r"cannot be loaded.*every process"):
            load(wrong)
    with pytest.raises(ConfigError, match=r"not derived from octavo\.LogitsProcessor"):
        load(f"{__name__}:Case")


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_listed_logprobs_are_those_of_the_whole_vocabulary(mode):
    listed = [60, 3, 17]
    params = [
        {"logprob_token_ids": listed},
        {"logprobs": -1},
        {"logprob_token_ids": [5]},
        {"logprobs": 3},
        {},
    ]
    results = []
    for extra in params:
        case = Case(SamplingParams(temperature=0.8, seed=4, logit_bias={3: 2.0}, **extra), seed=4)
        sampler = Sampler(VOCAB, 8, CPU, TORCH_SAMPLING, mode)
        sampler.add(0, case.message())
        results.append(sample(sampler, [case]))
    assert len({host.token_ids[0] for host in results}) == 1
    some, whole, one, top_ranked, nothing = (host.logprobs.get(0) for host in results)
    assert some.token_ids == [results[0].token_ids[0], *listed]
    assert one.token_ids[1:] == [5]
    assert (len(top_ranked.token_ids), nothing) == (4, None)
    scores = dict(zip(whole.token_ids, zip(whole.logprobs, whole.ranks, strict=True), strict=True))
    assert [scores[i] for i in some.token_ids] == list(zip(some.logprobs, some.ranks, strict=True))


def test_rows_with_different_lists_in_one_step():
    cases = [greedy(logprob_token_ids=ids) for ids in ([1, 2], [3, 4], [5])] + [greedy(logprobs=2)]
    host = sample(make(cases), cases)
    assert [entry.token_ids[1:] for entry in map(host.logprobs.get, range(3))] == [[1, 2], [3, 4], [5]]
    for row, entry in host.logprobs.items():
        expected = logits_of(row).log_softmax(0)[entry.token_ids].tolist()
        assert entry.logprobs == pytest.approx(expected, abs=1e-6)


def test_candidates_of_prompt_positions():
    logits = torch.stack([logits_of(row) for row in range(3)])
    candidates = [[4, 4, 60], [0], [7, 8]]
    kept = logits.clone()
    for mode, values in (("raw_logits", logits), ("raw_logprobs", logits.log_softmax(1))):
        found = score_candidates(logits, candidates, mode)
        for row, wanted, scores in zip(values, candidates, found, strict=True):
            assert scores == pytest.approx(row[wanted].tolist(), abs=1e-6)
    assert torch.equal(logits, kept)
