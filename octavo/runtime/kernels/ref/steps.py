"""References of the kernels that a recorded step begins and ends with."""

from torch import Tensor

from octavo.runtime.kernels.ref.chained import CHAIN_KERNELS
from octavo.runtime.kernels.ref.draws import forbid
from octavo.runtime.kernels.steps import StepKernels, StepRing


def begin_step(
    ring: StepRing, numbers: Tensor, kept_ids: Tensor, kept_tables: Tensor, ids: Tensor, tables: Tensor
) -> None:
    """See steps.BeginStep."""
    (num_tokens,), (_, num_rows, _) = ids.shape, tables.shape
    numbers.copy_(ring.given[int(ring.begun) % len(ring.given), : len(numbers)])
    ring.begun.add_(1)
    ids.copy_(kept_ids[numbers[:num_tokens]].clamp(min=0))
    tables.copy_(kept_tables[:, numbers[num_tokens : num_tokens + num_rows]])


def mask_step(ring: StepRing, logits: Tensor, words: Tensor) -> None:
    """See steps.MaskStep."""
    masks = ring.masks[(int(ring.begun) - 1) % len(ring.masks), : len(logits)].to(logits.device)
    rows = (masks >= 0).nonzero()[:, 0]
    forbid(logits, rows, masks[rows], words)


def end_step(
    ring: StepRing,
    token_ids: Tensor,
    max_logits: Tensor,
    targets: Tensor,
    kept_ids: Tensor,
    vocab_size: int,
    drafts: Tensor,
) -> None:
    """See steps.EndStep."""
    valid, index = token_ids.clamp(0, vocab_size - 1), (int(ring.begun) - 1) % len(ring.max_logits)
    kept_ids[targets] = valid
    ring.token_ids[index, : len(valid)] = valid
    ring.max_logits[index, : len(valid)] = max_logits
    ring.drafts[index, : len(drafts)] = drafts


STEP_KERNELS = StepKernels(begin_step, mask_step, end_step, CHAIN_KERNELS)
