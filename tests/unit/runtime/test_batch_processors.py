"""Processors written for vLLM's V1 interface: each request is known by one index, whatever comes and goes."""

import dataclasses
import random

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)
from octavo.messages.sampling import SamplingParams
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.sampling.request_functions import load_processors
from octavo.runtime.sampling.sampler import Sampler, with_users
from tests.fakes import fake_config
from tests.sampling_reference import Case

VOCAB, ROWS = 61, 6
CPU = torch.device("cpu")


class Target(LogitsProcessor):
    """As in vLLM's guide: a request with extra_args["target"] gets that token, plus its output's length."""

    instances = []  # noqa: RUF012  # one list for all is what is wanted

    @classmethod
    def validate_params(cls, sampling_params):
        if not isinstance((sampling_params.extra_args or {}).get("target", 0), int):
            raise ValueError("target must be a number")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.known = {}
        self.batch_size = 0
        self.instances.append(self)

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        self.batch_size = batch_update.batch_size
        for index in batch_update.removed:
            del self.known[index]
        for index, params, prompt, outputs in batch_update.added:
            self.known[index] = ((params.extra_args or {}).get("target"), prompt, outputs)
        for source, target, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            self.known[target] = self.known.pop(source)
        assert sorted(self.known) == list(range(self.batch_size))

    def apply(self, logits):
        assert logits.shape == (self.batch_size, VOCAB)
        for index, (target, prompt, outputs) in self.known.items():
            assert prompt == [1, 2, 3]
            if target is not None:
                logits[index] = float("-inf")
                logits[index, (target + len(outputs)) % VOCAB] = 0
        return logits


class Wrong(Target):
    def apply(self, logits):
        return logits[:0]


def load(name):
    config = fake_config()
    model = dataclasses.replace(config.model, logits_processors=[f"{__name__}:{name}"])
    return load_processors(dataclasses.replace(config, model=model))


def case(target=None):
    args = None if target is None else {"target": target}
    return Case(SamplingParams(temperature=0, extra_args=args))


def step(sampler, cases):
    """One step for some rows; the tokens by row."""
    rows = sorted(cases)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows)))
    host = sampler.sample(logits.clone(), rows, [len(cases[row].outputs) for row in rows]).to_host()
    for row, token_id in zip(rows, host.token_ids, strict=True):
        cases[row].outputs.append(token_id)
    greedy = logits.argmax(dim=1).tolist()
    return host, dict(zip(rows, greedy, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_request_gets_its_own(seed):
    Target.instances.clear()
    sampler = Sampler(VOCAB, ROWS, CPU, TORCH_SAMPLING, processors=with_users(load("Target")))
    chance, held = random.Random(seed), {}
    for _ in range(60):
        for row in [row for row in held if chance.random() < 0.3]:
            sampler.remove(row)
            del held[row]
        for row in [row for row in range(ROWS) if row not in held and chance.random() < 0.4]:
            held[row] = case(chance.choice([None, chance.randrange(VOCAB)]))
            held[row].outputs += range(chance.randrange(3))  # it comes back after a preemption
            sampler.add(row, held[row].message(str(row)))
        if taking_part := {row: held[row] for row in held if chance.random() < 0.8}:
            lengths = {row: len(one.outputs) for row, one in taking_part.items()}
            _, greedy = step(sampler, taking_part)
            for row, one in taking_part.items():
                target = (one.params.extra_args or {}).get("target")
                wanted = greedy[row] if target is None else (target + lengths[row]) % VOCAB
                assert one.outputs[-1] == wanted
    [processor] = Target.instances
    assert processor.max_num_seqs == fake_config().scheduler.max_num_seqs


def test_wrong_results_end_the_requests_of_the_step():
    sampler = Sampler(VOCAB, ROWS, CPU, TORCH_SAMPLING, processors=with_users(load("Wrong")))
    sampler.add(0, case().message("0"))
    host, _ = step(sampler, {0: case()})
    assert host.errors[0]


def test_only_processors_are_loaded():
    with pytest.raises(ConfigError, match=r"not derived from octavo\.LogitsProcessor"):
        load("case")


def test_the_helper_for_one_thing_per_request():
    entries = {0: "a", 1: "b", 2: "c"}
    added = [(1, SamplingParams(seed=9), [], []), (3, SamplingParams(), [], [])]
    moves = [(2, 0, MoveDirectionality.SWAP), (1, 4, MoveDirectionality.UNIDIRECTIONAL)]
    update = BatchUpdate(5, [], added, moves)
    assert process_dict_updates(entries, update, lambda params, prompt, output: params.seed)
    assert entries == {0: "c", 2: "a", 4: 9}
    assert process_dict_updates(entries, BatchUpdate(1, [2, 4], [], []), lambda *_: None)
    assert entries == {0: "c"}
    assert not process_dict_updates(entries, None, lambda *_: None)
