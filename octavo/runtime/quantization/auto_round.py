"""AutoRound (vLLM's "inc"): GPTQ's or AWQ's layout, with settings per module (`extra_config`).

Format: https://github.com/intel/auto-round.
"""

from octavo.base.errors import BadCheckpoint
from octavo.runtime.quantization.awq import AWQForm
from octavo.runtime.quantization.forms import Form
from octavo.runtime.quantization.gptq import GPTQForm, check_bits
from octavo.runtime.quantization.packed import PackedScheme
from octavo.runtime.quantization.stored_config import compiled, whole_number


class AutoRound(PackedScheme):
    """Reads AutoRound's config."""

    METHODS = ("auto-round", "auto_round", "inc")

    def form_of(self, module: str) -> Form | None:
        own = self.stored.get("extra_config") or {}
        config = self.stored | own.get(module, {})
        for pattern in own:
            if module not in own and compiled(pattern).fullmatch(module):
                config = self.stored | own[pattern]
        blocks = self.stored.get("block_name_to_quantize")
        names = blocks.split(",") if isinstance(blocks, str) else blocks or []
        inside = any(f".{name.strip()}." in f".{module}" for name in names) if names else module != "lm_head"
        bits = whole_number(config, "bits")
        if bits >= 16 or not (inside or module in own):
            return None
        layout = str(config.get("packing_format", "auto_round:auto_gptq")).lower()
        if "awq" in layout:
            check_bits(bits, (4,), "AutoRound in AWQ's layout")
            return AWQForm(whole_number(config, "group_size"))
        if "gptq" not in layout:
            raise BadCheckpoint(
                f"AutoRound's packing_format {layout!r} is not read; export auto_gptq or auto_awq"
            )
        check_bits(bits, (2, 3, 4, 8), "AutoRound")
        return GPTQForm(bits, whole_number(config, "group_size"))
