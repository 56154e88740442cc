"""Masks of a step: bits from the engine, applied to the right rows of the logits, before everything else."""

import numpy as np
import pytest
import torch

from octavo.messages.request import RequestSpec
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import NewRequest, TokenMasks
from octavo.runtime.kernels.choice import TORCH_SAMPLING
from octavo.runtime.sampling.masks import MaskTable
from octavo.runtime.sampling.sampler import Sampler

CPU = torch.device("cpu")


def make(indexes, allowed, vocab_size):
    bits = np.zeros((len(indexes), -(-vocab_size // 32)), np.uint32)
    for row, ids in enumerate(allowed):
        for token_id in ids:
            bits[row, token_id // 32] |= np.uint32(1 << token_id % 32)
    return TokenMasks(indexes, [*range(len(indexes))], bits.tobytes())


def read(masks, samples, vocab_size):
    return MaskTable(vocab_size, 4, CPU).read(masks, samples)


def sampler(vocab_size, *params):
    result = Sampler(vocab_size, 8, CPU, TORCH_SAMPLING)
    for slot, param in enumerate(params):
        result.add(slot, NewRequest(f"r{slot}", [1], 1, RequestSpec(param, slot)))
    return result


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100, 256])
def test_only_the_rows_of_the_step_that_sample(vocab_size):
    generator = np.random.default_rng(vocab_size)
    samples = np.array([0, 2, 3, 6])  # places in the step of the rows of the logits
    allowed = [[*generator.choice(vocab_size, 5, replace=False).tolist(), vocab_size - 1] for _ in range(2)]
    masks = read(make([2, 6], allowed, vocab_size), samples, vocab_size)
    logits = torch.randn(4, vocab_size)
    expected = logits.clone()
    for row, ids in zip((1, 3), allowed, strict=True):
        keep = torch.zeros(vocab_size, dtype=torch.bool)
        keep[ids] = True
        expected[row, ~keep] = float("-inf")
    masks.apply(logits, TORCH_SAMPLING.forbid)
    torch.testing.assert_close(logits, expected)


def test_every_row():
    masks = read(make([0, 1], [[3], [4]], 40), np.arange(2), 40)
    logits = torch.zeros(2, 40)
    masks.apply(logits, TORCH_SAMPLING.forbid)
    assert logits.isfinite().nonzero().tolist() == [[0, 3], [1, 4]]


def test_rows_share_a_mask():
    one = make([0], [[3]], 40).bits
    masks = read(TokenMasks([0, 1, 4], [1, 0, 1], make([0], [[7]], 40).bits + one), np.arange(5), 40)
    logits = torch.zeros(5, 40)
    masks.apply(logits, TORCH_SAMPLING.forbid)
    assert [row.isfinite().nonzero()[:, 0].tolist() for row in logits[[0, 1, 4]]] == [[3], [7], [3]]
    assert logits[2:4].isfinite().all()


def test_masks_stay_where_they_were_kept():
    """Only new ones are sent; a place is given to another mask when the engine says so."""
    table, rows = MaskTable(40, 4, CPU), np.arange(2)

    def allowed(masks):
        logits = torch.zeros(2, 40)
        table.read(masks, rows).apply(logits, TORCH_SAMPLING.forbid)
        return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]

    bits = make([0, 1], [[3], [4]], 40).bits
    assert allowed(TokenMasks([0, 1], [2, 0], bits, [0, 2])) == [[4], [3]]
    assert allowed(TokenMasks([0, 1], [0, 0], b"", [])) == [[3], [3]]
    assert allowed(TokenMasks([0, 1], [2, 0], make([0], [[9]], 40).bits, [2])) == [[9], [3]]
    assert allowed(TokenMasks([0, 1], [0, 1], bits)) == [[3], [4]], "masks that are not kept"
    assert allowed(TokenMasks([0, 1], [0, 2], b"", [])) == [[3], [9]]


def test_a_token_is_chosen_among_the_allowed_and_raw_logprobs_stay_raw():
    vocab_size = 50
    logits = torch.randn(3, vocab_size)
    plain = SamplingParams(temperature=0, logprobs=1)
    drawn = SamplingParams(temperature=1.0, logprobs=1, seed=1)
    masks = read(make([1, 2], [[7, 9], [11]], vocab_size), np.arange(3), vocab_size)
    chosen = sampler(vocab_size, plain, plain, drawn).sample(logits.clone(), [0, 1, 2], [0, 0, 0], masks)
    host = chosen.to_host()
    best = 7 if logits[1, 7] > logits[1, 9] else 9
    assert host.token_ids == [int(logits[0].argmax()), best, 11]
    raw = logits.log_softmax(dim=-1)
    assert [entry.logprobs[0] for _, entry in sorted(host.logprobs.items())] == pytest.approx(
        [float(raw[row, token]) for row, token in enumerate(host.token_ids)], abs=1e-5
    )


def test_constraints_that_contradict_each_other_end_the_row_alone():
    vocab_size = 50
    torn = SamplingParams(temperature=0, allowed_token_ids=[1, 2])
    masks = read(make([0], [[3]], vocab_size), np.arange(2), vocab_size)
    output = sampler(vocab_size, torn, SamplingParams(temperature=0)).sample(
        torch.randn(2, vocab_size), [0, 1], [0, 0], masks
    )
    host = output.to_host()
    assert "forbid the whole vocabulary" in host.errors[0] and 1 not in host.errors
