"""bitsandbytes: 16 levels (nf4, fp4) under the largest of 64 weights, or int8 rows under theirs.

Format: https://github.com/bitsandbytes-foundation/bitsandbytes. A matrix lies in one long row, the first of
two weights in a byte's high half; with double quantization the blocks' maxima are codes of a table of their
own. Inputs of int8 files keep their precision: columns of outlying inputs need no second path.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.base.errors import BadCheckpoint
from octavo.config.engine import EngineConfig
from octavo.runtime.quantization.forms import FLOATS, Expected, Form, Part
from octavo.runtime.quantization.grouped import Grouped, Kind
from octavo.runtime.quantization.method import Sources, Storage
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.packed_layout import EACH, Axis, PackedLayout, groups_of
from octavo.runtime.quantization.scaled import ScaledForm
from octavo.runtime.quantization.stored_config import is_excluded

_BYTES = (torch.uint8,)


@dataclass(frozen=True)
class LevelsForm(Form):
    """Codes of 4 bits; `is_nested`: the scales are codes themselves."""

    kind: Kind
    is_nested: bool
    block: int = 64

    def tensors(self, part: Part) -> Mapping[str, Expected]:
        if part.inputs.full % self.block:
            raise BadCheckpoint(f"blocks of {self.block} weights cross its rows of {part.inputs.full}")
        scales = Expected(PackedLayout(EACH, Axis(self.block)), FLOATS + _BYTES, is_flat=True)
        made = {
            "weight": Expected(PackedLayout(EACH, Axis(2, is_word=True)), _BYTES, is_flat=True),
            "absmax": Expected(None, FLOATS) if self.is_nested else scales,
            "quant_map": Expected(None, FLOATS),
            "quant_state": Expected(None, _BYTES),
        }
        if self.is_nested:
            nested = dict.fromkeys(("nested_absmax", "nested_quant_map"), Expected(None, FLOATS))
            made |= nested | {"absmax": Expected(None, _BYTES)}
        return made

    @property
    def packed_as(self) -> tuple[Kind, int]:
        return self.kind, 64

    def read(self, stored: Mapping[str, Tensor], part: Part) -> Grouped:
        packed = stored["weight"]
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten(-2)
        groups = groups_of(self.block).entry_of(part.inputs)
        return Grouped(self.kind, codes, self._scales(stored, part), None, groups)

    def _scales(self, stored: Mapping[str, Tensor], part: Part) -> Tensor:
        state = _read_state(stored["quant_state"])
        if state.get("blocksize", self.block) != self.block:
            raise BadCheckpoint(f"blocks of {state['blocksize']} weights; those of {self.block} are read")
        scales = stored["absmax"]
        if not self.is_nested:
            return scales.float()
        size, offset = state.get("nested_blocksize", 256), state.get("nested_offset", 0.0)
        tops = stored["nested_absmax"].float().repeat_interleave(size)[: scales.numel()]
        if len(tops) != scales.numel():
            raise BadCheckpoint("nested_absmax has too few entries")
        whole: Tensor = stored["nested_quant_map"].float()[scales.flatten().long()] * tops + offset
        rows = slice(part.outputs.start, part.outputs.start + part.outputs.size)
        first = part.inputs.start // self.block
        return whole.view(part.outputs.full, -1)[rows, first:].contiguous()


def _read_state(raw: Tensor) -> dict[str, Any]:
    """Return the JSON that a tensor of bytes holds."""
    try:
        state = json.loads(bytes(raw.tolist()))
    except ValueError as error:
        raise BadCheckpoint(f"quant_state holds no JSON: {error}") from error
    return state if isinstance(state, dict) else {}


class BitsAndBytes(PackedScheme):
    """Reads the config that transformers writes."""

    METHODS = ("bitsandbytes",)

    def __init__(self, storage: Storage, config: EngineConfig, sources: Sources) -> None:
        super().__init__(storage, config, sources)
        kinds: dict[str, Kind] = {"nf4": "NF4", "fp4": "FP4"}
        name = str(self.stored.get("bnb_4bit_quant_type", "fp4"))
        if name not in kinds:
            raise BadCheckpoint(f"bnb_4bit_quant_type={name!r}; nf4 and fp4 are known")
        nested = bool(self.stored.get("bnb_4bit_use_double_quant"))
        in_4_bits = self.stored.get("load_in_4bit") or self.stored.get("_load_in_4bit")
        self._form: Form = (
            LevelsForm(kinds[name], nested) if in_4_bits else ScaledForm("S8", "SCB", divisor=127.0)
        )

    @classmethod
    def stored_name(cls, name: str) -> str | None:
        """See Scheme.stored_name: what belongs to a weight stands behind its name."""
        name = name.replace(".weight.quant_state.bitsandbytes__", ".quant_state.").replace(".weight.", ".")
        if name.endswith((".weight_format", ".nested_offset")):
            return None
        head, found, _ = name.partition(".quant_state.")
        return head + ".quant_state" if found else name

    def form_of(self, module: str) -> Form | None:
        skipped = self.stored.get("llm_int8_skip_modules")
        return None if is_excluded(module, skipped or ["lm_head"]) else self._form
