"""The compiled kernels of experts."""

import torch
from torch import Tensor

from octavo.runtime.kernels.cpu.arguments import ACTIVATIONS, TYPE_IDS, address_of, rows_of, way_of
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.experts import Changes, ExpertForm, Router, Routing, Shared, Stacks
from octavo.runtime.kernels.linear import Packed

_SCORES = {"softmax": 0, "sigmoid": 1, "logits": 2}


class CompiledExperts:
    """The ops over one loaded library and a number of threads."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads

    def route(
        self, logits: Tensor, bias: Tensor | None, router: Router, ids: Tensor | None = None
    ) -> Routing:
        """See experts.Route."""
        size = len(logits), router.top_k
        made = Routing(torch.empty(size, dtype=torch.int32) if ids is None else ids, torch.empty(size))
        top_k, scores, *how = router
        given = *rows_of(logits), *logits.shape, address_of(bias), top_k, _SCORES[scores], *how
        self._library.octavo_route(*given, made.ids.data_ptr(), made.weights.data_ptr(), self._threads)
        return made

    def block_experts(
        self, x: Tensor, routing: Routing, stacks: Stacks, form: ExpertForm, shared: Shared | None
    ) -> Tensor:
        """See experts.BlockExperts."""
        out = torch.empty((len(x), stacks.down.blocks.shape[1]))
        address, stride = rows_of(x)
        ids, weights = routing
        assert ids.dtype == torch.int32 and ids.is_contiguous() and weights.is_contiguous()
        chosen = ids.data_ptr(), weights.data_ptr(), ids.shape[1], len(stacks.up.blocks)
        matrices = [number for stack in stacks for number in _matrices(stack)]
        biases = address_of(form.up_bias), address_of(form.down_bias)
        rows = (None, 0) if shared is None else rows_of(shared.rows)
        factors = (None, 0) if shared is None or shared.gate is None else rows_of(shared.gate)
        how = *biases, ACTIVATIONS[form.activation], form.weighs_inputs, *form[4:6], *rows, *factors
        end = *_changes(form.changes, len(x)), out.data_ptr(), self._threads
        self._library.octavo_experts(address, *x.shape, stride, *chosen, *matrices, *how, *end)
        return out


def _changes(changes: Changes | None, rows: int) -> tuple[int | None, ...]:
    if changes is None:
        return (None, 0) + 4 * (None,)
    slots, up, down, _ = changes
    assert len(slots) == rows and slots.dtype == torch.int32
    tables = (part.data_ptr() for table in (up, down) for part in (table.entries, table.bounds))
    return slots.data_ptr(), up.dtype == torch.bfloat16, *tables


def _matrices(stack: Packed) -> tuple[int, ...]:
    blocks = stack.blocks
    assert blocks.stride(2) == 1
    where = blocks.data_ptr(), blocks.shape[1], blocks.stride(1), blocks.stride(0)
    return *where, TYPE_IDS[stack.type_name], way_of(stack)
