"""Rows that need nothing but their logits: chosen from what is on the device, by functions or by kernels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.messages.sampling import SamplingParams
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.kernels.sampling import TruncateAndDraw
from octavo.runtime.sampling.sampler import Kind, Sampler
from tests.kernel_cases import tensors_in
from tests.sampling_reference import Case


def strict(op):
    """The op, for arguments as a kernel reads them."""

    def checked(*args):
        assert all(tensor.is_contiguous() for tensor in tensors_in(args)), "entry i is not at place i"
        return op(*args)

    return checked


REF = ref_table().sampling
KERNELS = replace(REF, choose=TruncateAndDraw(strict(REF.choose.draw), strict(REF.choose.truncate)))
VOCAB = 200  # fewer than candidates are worth: both ways draw in the order of ids
CPU = torch.device("cpu")
GREEDY = {"temperature": 0.0}
WHOLE = {"temperature": 0.8}
CUT = {"temperature": 1.2, "top_k": 7, "top_p": 0.9}


def make(options, kernels=TORCH_SAMPLING):
    sampler = Sampler(VOCAB, 16, CPU, kernels)
    for row, values in enumerate(options):
        sampler.add(row, Case(SamplingParams(**values), seed=row).message(str(row)))
    return sampler


def logits(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("kernels", [TORCH_SAMPLING, KERNELS], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "options", [[GREEDY] * 6, [WHOLE] * 6, [GREEDY, WHOLE] * 3, [CUT, GREEDY, WHOLE] * 2]
)
def test_choose_is_sample(options, kernels):
    """In any order of the rows, and whichever way they are served."""
    rows, positions = np.array([3, 0, 5, 1, 4, 2]), np.array([0, 7, 2, 1, 9, 4])
    expected = make(options).sample(logits(6), rows, positions).to_host()
    sampler = make(options, kernels)
    assert sampler.sample(logits(6), rows, positions).to_host() == expected
    kind = sampler.plain_kind(rows)
    assert kind is not None
    chosen = sampler.choose(logits(6), torch.from_numpy(rows), torch.from_numpy(positions), kind)
    assert chosen.token_ids.tolist() == expected.token_ids


@pytest.mark.parametrize("values", [{"logprobs": 0}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 1.0}])
def test_what_is_not_plain(values):
    sampler = make([WHOLE, WHOLE | values])
    assert sampler.plain_kind(np.array([0])) is Kind.WHOLE and sampler.plain_kind(np.array([0, 1])) is None
    sampler.remove(1)
    sampler.add(1, Case(SamplingParams(**WHOLE)).message())
    assert sampler.plain_kind(np.array([0, 1])) is Kind.WHOLE, "the next owner of a row is asked anew"


@pytest.mark.parametrize("kernels", [TORCH_SAMPLING, KERNELS], ids=["cpu", "gpu"])
def test_rows_without_a_valid_token_fail_alone(kernels):
    wrong = logits(3)
    wrong[0, 5] = float("nan")
    wrong[1] = float("-inf")
    output = make([GREEDY, WHOLE, WHOLE], kernels).sample(wrong, [0, 1, 2], [0, 0, 0])
    assert all(0 <= token_id < VOCAB for token_id in output.token_ids.tolist())
    host = output.to_host()
    assert "not finite" in host.errors[0] and "forbid" in host.errors[1] and 2 not in host.errors


def test_results_survive_the_memory_they_were_made_in():
    """What was sent to the host is a copy, also where the device is the host."""
    output = make([GREEDY] * 2).sample(logits(2), [0, 1], [0, 0])
    expected = output.to_host()
    pending = output.send()
    with torch.inference_mode():
        output.token_ids.fill_(1)
    assert pending.read() == expected
