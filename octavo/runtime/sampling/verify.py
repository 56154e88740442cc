"""`sample_in_order`: the tokens of requests whose drafts are verified, each as if it were the only one.

Called by the model runner. A row samples what stands behind a draft, which counts if the draft came true.
What takes note of chosen tokens, as penalties do, must see those that were kept and no others: such rows are
sampled one place after the other.
"""

import numpy as np
import torch

from octavo.runtime.kernels.sampling import Scores
from octavo.runtime.sampling.masks import RowMasks
from octavo.runtime.sampling.output import SamplerOutput
from octavo.runtime.sampling.sampler import Sampler
from octavo.runtime.transfer import Array, to_device


def sample_in_order(
    sampler: Sampler,
    logits: torch.Tensor,
    rows: Array,
    positions: Array,
    masks: RowMasks | None,
    expected: Array | None,
) -> SamplerOutput:
    """Choose the tokens of rows of which several may be one request's, place by place in its output.

    logits, rows, positions, masks: as in Sampler.sample, but `rows` may repeat
    expected: [rows] int64: the draft behind each, -1 = none; None = no row repeats
    returns any id, or none (-1), where the draft before did not come true
    """
    if expected is None or not sampler.looks_back(rows):
        return sampler.sample(logits, rows, positions, masks, expected)
    token_ids = torch.full((len(rows),), -1, device=logits.device)
    max_logits = torch.zeros(len(rows), device=logits.device)
    scores: list[tuple[Array, Scores]] = []
    faults: dict[int, str] = {}
    places = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    while places.size:
        part = None if masks is None else masks.at(places)
        on_device = to_device(places, logits.device)
        found = sampler.sample(logits[on_device], rows[places], positions[places], part, expected[places])
        token_ids[on_device], max_logits[on_device] = found.token_ids, found.max_logits
        scores += [(places[of], values) for of, values in found.scores]
        faults |= {int(places[of]): text for of, text in found.faults.items()}
        places = places[found.token_ids.cpu().numpy() == expected[places]] + 1
    return SamplerOutput(token_ids, max_logits, scores, faults)
