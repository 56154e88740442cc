"""`AttentionBackend`: how attention layers reach the paged cache; implemented once per way of doing it.

Layers call `run`, the model runner calls `plan` once per step.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.kernels.attention import HeadNorms, Rotation
from octavo.runtime.kernels.precision import InputPrecision
from octavo.runtime.platforms.platform import Platform


class AttentionBackend(ABC):
    """Writes new keys and values into the cache and attends over it, in arithmetic of `activations`."""

    def __init__(self, platform: Platform, activations: InputPrecision = "float32") -> None:
        self.platform = platform
        self.activations = activations

    @staticmethod
    @abstractmethod
    def supports(spec: KVCacheSpec, platform: Platform) -> str | None:
        """None, or the reason why this back end cannot serve such layers there."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Host work that all layers of a step share; before the first layer."""

    @abstractmethod
    def run(  # noqa: PLR0913  # what attention is made of
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        tables: GroupTables,
        batch: ForwardBatch,
        *,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Normalise and rotate q and k, store k and v, attend; returns [T, num_heads, head_dim].

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]; contiguous in all but the first axis;
                       q and k may be overwritten
        cache, tables: those of the layer; the other arguments as in kernels.attention
        """
