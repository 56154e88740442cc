"""AWQ: 4 bits along the outputs in an order of its own, scales and zero points per group of inputs.

Layout: the GEMM version of AutoAWQ (https://github.com/casper-hansen/AutoAWQ).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.codes import unpack_awq
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.gptq import WORDS, check_bits, check_group
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.packed_layout import EACH, PackedLayout, groups_of, words
from octavo.runtime.quantization.stored_config import is_excluded, whole_number


@dataclass(frozen=True)
class AWQForm(Form):
    """A matrix in words along its outputs. group: -1 = one per column."""

    group: int

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        check_group(self.group, part)
        if part.outputs.full % 8:
            raise BadCheckpoint(f"AWQ packs 8 outputs into a word, which do not divide {part.outputs.full}")
        packed, groups = words(4), groups_of(self.group)
        return {
            "qweight": Expected(PackedLayout(packed, EACH, is_transposed=True), WORDS),
            "qzeros": Expected(PackedLayout(packed, groups, is_transposed=True), WORDS),
            "scales": Expected(PackedLayout(EACH, groups, is_transposed=True), FLOATS),
        }

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return "U4", self.group

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        codes, zeros = (unpack_awq(stored[name]).t() for name in ("qweight", "qzeros"))
        groups = groups_of(self.group).entry_of(part.inputs)
        return Grouped("U4", codes.contiguous(), stored["scales"].t().float(), zeros.float(), groups)


class AWQ(PackedScheme):
    """Reads AutoAWQ's config."""

    METHODS = ("awq",)

    def form_of(self, module: str) -> Form | None:
        config = self.stored
        if module == "lm_head" or is_excluded(module, config.get("modules_to_not_convert")):
            return None
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise BadCheckpoint(f"AWQ version {version!r} is not read, only 'gemm': convert the checkpoint")
        check_bits(whole_number(config, "bits", "w_bit"), (4,), "AWQ")
        return AWQForm(whole_number(config, "group_size", "q_group_size"))
