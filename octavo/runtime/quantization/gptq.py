"""GPTQ: words of 2, 3, 4 or 8 bits along the inputs, scales and packed zero points per group, an order.

Layout: AutoGPTQ and GPTQModel (https://github.com/ModelCloud/GPTQModel). Version 1 stores every zero point
less one. With act-order `g_idx` says which group an input belongs to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.codes import unpack_rows
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.method import Sources, Storage
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.packed_layout import EACH, WHOLE, PackedLayout, groups_of, words
from octavo.runtime.quantization.stored_config import compiled, whole_number

WORDS = (torch.int32,)


@dataclass(frozen=True)
class GPTQForm(Form):
    """A matrix in words. group: -1 = one per column; shift: what the stored zero points lack."""

    bits: int
    group: int
    shift: int = 1

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        check_group(self.group, part)
        packed, groups = words(self.bits), groups_of(self.group, is_uncut=True)
        return {
            "qweight": Expected(PackedLayout(EACH, packed, is_transposed=True), WORDS),
            "qzeros": Expected(PackedLayout(packed, groups, is_transposed=True), WORDS),
            "scales": Expected(PackedLayout(EACH, groups, is_transposed=True), FLOATS),
            "g_idx": Expected(PackedLayout(WHOLE, EACH), (torch.int32, torch.int64), is_optional=True),
        }

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return kind_of(self.bits), self.group

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        codes = unpack_rows(stored["qweight"].t(), self.bits, part.inputs.size)
        zeros = unpack_rows(stored["qzeros"], self.bits, part.outputs.size).t().float() + self.shift
        scales = stored["scales"].t().float()
        groups = groups_of(self.group, is_uncut=True).entry_of(part.inputs)
        if "g_idx" in stored:
            groups = stored["g_idx"].flatten().long()
            if groups.min() < 0 or groups.max() >= scales.shape[1]:
                raise BadCheckpoint(f"g_idx has groups beyond the {scales.shape[1]} of scales")
        return grouped(self.bits, codes, scales, zeros, groups)


def kind_of(bits: int) -> Kind:
    """Return the kind of codes of so many bits."""
    kinds: dict[int, Kind] = {2: "U2", 3: "U3", 4: "U4", 8: "U8"}
    return kinds[bits]


def grouped(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor) -> Grouped:
    """Return codes of 0 … 2^bits - 1 and zero points among them as groups."""
    if bits == 8:  # kernels count bytes from -128 on
        return Grouped("U8", codes ^ 128, scales, None if zeros is None else zeros - 128, groups)
    return Grouped(kind_of(bits), codes, scales, zeros, groups)


def check_group(group: int, part: Part) -> None:
    """Raise BadCheckpoint for groups that do not divide the inputs."""
    if group > 0 and part.inputs.full % group:
        raise BadCheckpoint(
            f"group_size={group} does not divide its {part.inputs.full} inputs; quantize it with one that "
            "does, or -1 for one group"
        )


def check_bits(bits: int, allowed: tuple[int, ...], method: str) -> None:
    """Raise BadCheckpoint for a number of bits that the format has not."""
    if bits not in allowed:
        listed = ", ".join(map(str, allowed))
        raise BadCheckpoint(f"Unsupported quantization config: bits={bits} of {method}. Allowed: {listed}.")


class GPTQ(PackedScheme):
    """Reads GPTQ's config, with rules per module (`dynamic`)."""

    METHODS = ("gptq",)

    def __init__(self, storage: Storage, config: EngineConfig, sources: Sources) -> None:
        super().__init__(storage, config, sources)
        self._shift = 0 if self.stored.get("checkpoint_format") == "gptq_v2" else 1
        self._only = [
            name for names in self.stored.get("modules_in_block_to_quantize") or [] for name in names
        ]
        rules = (self.stored.get("dynamic") or {}).items()
        self._rules = [(compiled(rule.lstrip("+-").lstrip(":")), rule[:1] == "-", own) for rule, own in rules]

    def form_of(self, module: str) -> Form | None:
        config = self.stored
        if module == "lm_head" and not config.get("lm_head"):
            return None
        if self._only and not any(module.endswith(name) for name in self._only):
            return None
        for pattern, skips, own in self._rules:
            if pattern.match(module):
                if skips:
                    return None
                config = config | own
                break
        bits = whole_number(config, "bits")
        check_bits(bits, (2, 3, 4, 8), "GPTQ")
        return GPTQForm(bits, whole_number(config, "group_size"), self._shift)
