"""`SideBySide` has attention and a recurrence, which read the same input and whose outputs are added up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.recurrent import Recurrent, RecurrentArch
from octavo.runtime.layers.self_attention import AttentionSetting, HeadsArch, SelfAttention


@dataclass(frozen=True, kw_only=True)
class SideBySideArch:
    """A SideBySideArch describes both.

    factors: of parts of the layer, by names of the family, which multiplies weights by them while loading
    """

    is_causal: ClassVar[bool] = True
    heads: HeadsArch
    recurrent: RecurrentArch
    factors: Mapping[str, float] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        """Return the size of a head of attention."""
        return self.heads.head_dim


class SideBySide(nn.Module):
    """Layer i keeps its heads' keys and values as cache layer 2 i, its state as the next one."""

    def __init__(
        self, arch: SideBySideArch, build: BuildContext, layer_id: int, size: int, setting: AttentionSetting
    ) -> None:
        super().__init__()
        place = build.at("recurrent")
        self.heads = SelfAttention(arch.heads, build.at("heads"), 2 * layer_id, size, setting)
        self.recurrent = Recurrent(arch.recurrent, place, 2 * layer_id + 1, size, setting.norm.eps)

    def forward(self, x: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Map [T, size] to [T, size], or to these rows of it."""
        out: Tensor = self.heads(x, batch, rows) + self.recurrent(x, batch, rows)
        return out

    defer = forward
