"""HQQ: codes in groups of inputs, weight = (code - zero) * scale, both any numbers of 16 bits.

The codes of a whole matrix are one tall table, a group a row, of which parts lie over each other in the bits
of a byte (3 bits: ten in a word). Format: https://github.com/mobiusml/hqq (hqq/core/bitpack.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.gptq import check_bits, check_group, grouped, kind_of
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.packed_layout import groups_of
from octavo.runtime.quantization.stored_config import is_excluded

_PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4}
_OF_META = frozenset({"nbits", "axis", "group_size", "shape", "channel_wise", "packing", "unpack_view_dtype"})
_OF_META |= {"view_as_float", "quant_scale", "quant_zero", "compute_dtype", "stores_quant_config"}
_OF_META |= {"encoded_state_dict", "offload_meta", "round_zero", "optimize"}


@dataclass(frozen=True)
class HQQForm(Form):
    """group: inputs that share scale and zero point, -1 = all."""

    bits: int
    group: int

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        check_group(self.group, part)
        whole = Expected(None, (torch.uint8, torch.int32))
        return {"W_q": whole, "scale": Expected(None, FLOATS), "zero": Expected(None, FLOATS)}

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return kind_of(self.bits), self.group

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        n, k = part.outputs.full, part.inputs.full
        size = self.group if self.group > 0 else k
        codes = _unpack(stored["W_q"], self.bits, size)
        tables = [codes, stored["scale"].float().flatten(), stored["zero"].float().flatten()]
        if len(codes) < n * k // size or any(len(t) != n * k // size for t in tables[1:]):
            shapes = {name: list(tensor.shape) for name, tensor in stored.items()}
            raise BadCheckpoint(f"{shapes} do not hold {n} x {k} weights in groups of {size}")
        codes, scales, zeros = (t[: n * k // size].reshape(n, -1) for t in tables)
        rows = slice(part.outputs.start, part.outputs.start + part.outputs.size)
        columns = slice(part.inputs.start, part.inputs.start + part.inputs.size)
        groups = groups_of(self.group).entry_of(part.inputs)
        first = part.inputs.start // size
        last = first + int(groups[-1]) + 1
        scales, zeros = scales[rows, first:last], zeros[rows, first:last]
        return grouped(self.bits, codes[rows, columns].contiguous(), scales, zeros, groups)


def _unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return the codes [groups, size], uint8; the first part of the table lies in the highest bits."""
    packed = packed.reshape(-1, size)
    shifts = range(bits * (_PER_WORD[bits] - 1), -1, -bits)
    return torch.cat([(packed >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts])


class HQQ(PackedScheme):
    """Reads the config that transformers writes."""

    METHODS = ("hqq",)
    NEEDLESS = _OF_META

    def form_of(self, module: str) -> Form | None:
        config = self.stored.get("quant_config") or {}
        skipped = self.stored.get("skip_modules")
        if is_excluded(module, ["lm_head"] if skipped is None else skipped):
            return None
        if "weight_quant_params" not in config:  # by the last part of the name
            config = next((own for name, own in config.items() if module.endswith(name)), None)
            if config is None:
                return None
        return _form(config["weight_quant_params"])


def _form(config: dict[str, Any]) -> Form:
    check_bits(config.get("nbits", 4), tuple(sorted(_PER_WORD)), "HQQ")
    if config.get("axis", 1) != 1 or config.get("view_as_float") or not config.get("channel_wise", True):
        raise BadCheckpoint(
            f"HQQ with {config} is not read; axis=1, channel_wise and no view_as_float are: quantize it so."
        )
    return HQQForm(config.get("nbits", 4), config.get("group_size") or -1)
