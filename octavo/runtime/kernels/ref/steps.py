"""Twins of the kernels that a recorded step begins and ends with."""

from torch import Tensor

from octavo.runtime.kernels.steps import StepKernels, Turns


def begin_step(
    turns: Turns, numbers: Tensor, kept_ids: Tensor, kept_tables: Tensor, ids: Tensor, tables: Tensor
) -> None:
    """See steps.BeginStep."""
    (num_tokens,), (_, num_rows, _) = ids.shape, tables.shape
    numbers.copy_(turns.given[int(turns.begun) % len(turns.given), : len(numbers)])
    turns.begun.add_(1)
    ids.copy_(kept_ids[numbers[:num_tokens]])
    tables.copy_(kept_tables[:, numbers[num_tokens : num_tokens + num_rows]])


def end_step(
    turns: Turns, token_ids: Tensor, max_logits: Tensor, targets: Tensor, kept_ids: Tensor, vocab_size: int
) -> None:
    """See steps.EndStep."""
    valid, turn = token_ids.clamp(0, vocab_size - 1), (int(turns.begun) - 1) % len(turns.max_logits)
    kept_ids[targets] = valid
    turns.token_ids[turn, : len(valid)] = valid
    turns.max_logits[turn, : len(valid)] = max_logits


STEP_KERNELS = StepKernels(begin_step, end_step)
