"""The compiled kernels of recurrent layers."""

import torch
from torch import Tensor

from octavo.runtime.kernels.cpu.arguments import address_of, rows_of
from octavo.runtime.kernels.cpu.library import Library
from octavo.runtime.kernels.recurrent import Conv, Decay, Factors, GateForm, Scanned, States


class CompiledRecurrence:
    """The ops over one loaded library and a number of threads."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads

    def causal_conv(self, x: Tensor, conv: Conv, states: States, factors: Factors | None) -> Tensor:
        """See recurrent.CausalConv."""
        weight, bias, silu = conv
        assert weight.is_contiguous()
        y = torch.empty(x.shape)
        before, behind = ((None, 0), (None, 0)) if factors is None else map(rows_of, factors)
        how = weight.data_ptr(), len(weight), address_of(bias), silu, *before, *behind
        end = y.data_ptr(), self._threads
        self._library.octavo_causal_conv(*rows_of(x), *x.shape, *how, *_states(states), *end)
        return y

    def scan(self, new: Scanned, decay: Decay, states: States) -> Tensor:
        """See recurrent.Scan."""
        queries, keys, values, steps, strengths = new
        y = torch.empty(values.shape)
        shapes = *keys.shape[1:], *values.shape[1:]
        rates = decay.rate.data_ptr(), decay.bias.data_ptr(), address_of(decay.skip), *decay.limits
        scores = *rows_of(steps), *((None, 0) if strengths is None else rows_of(strengths))
        given = *rows_of(queries), *rows_of(keys), *rows_of(values), *scores, *shapes, *rates
        self._library.octavo_scan(*given, *_states(states), y.data_ptr(), self._threads)
        return y

    def gate(self, x: Tensor, gates: Tensor, form: GateForm) -> Tensor:
        """See recurrent.Gate."""
        y = torch.empty(x.shape)
        parts = 1 if form.weight is None else x.shape[1] * form.groups // len(form.weight)
        norm = address_of(form.weight), form.eps, parts, form.groups
        how = *norm, form.norm_first, form.sigmoid, y.data_ptr(), self._threads
        self._library.octavo_gate(*rows_of(x), *rows_of(gates), *x.shape, *how)
        return y


def _states(states: States) -> tuple[int, ...]:
    cache, offset, tables, slots, batch, num_drafts = states
    where = cache.data_ptr(), cache.stride(0), cache.shape[1], offset
    lens = batch.cu_q_lens.data_ptr(), batch.kv_lens.data_ptr(), len(batch.kv_lens), num_drafts
    return *where, tables.data_ptr(), tables.stride(0), slots.data_ptr(), *lens
