"""A `PackedTower` is the transformer over patches of images of any proportions: Pixtral's and Qwen's.

A rope of two axes tells where a patch is.
"""

from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.rotary import AxialRotary
from octavo.runtime.models.arch import Arch, Config, factor_of, read_heads
from octavo.runtime.models.decoder import DecoderLayer
from octavo.runtime.models.vision import run_blocks


class PackedTower(nn.Module):
    """Computes patches of several images, one after the other; those of a sequence see each other."""

    def __init__(
        self, body: Arch, config: Config, build: BuildContext, num_inputs: int, *, bias: bool, shares: bool
    ) -> None:
        """num_inputs: numbers of a patch; bias: of its embedding; shares: see AxialRotary"""
        super().__init__()
        self.size, self._dtype = body.hidden_size, build.compute_dtype
        self.patches = ReplicatedLinear(build.at("patches"), num_inputs, self.size, bias)
        rope, head_dim = config.get("rope_parameters") or {}, read_heads(config).head_dim
        theta = factor_of({"rope_theta": config.get("rope_theta") or 1e4} | rope, "rope_theta")
        self._rotary = AxialRotary(head_dim, theta, build.device, shares=shares)
        self.blocks = nn.ModuleList(
            DecoderLayer(body, build.at(f"blocks.{i}"), i, self._rotary) for i in range(len(body.layers))
        )

    def embed(self, patches: Tensor) -> Tensor:
        """Return the embeddings of patches, [P, size]."""
        x: Tensor = self.patches(patches.to(self._dtype))
        return x

    def forward(
        self,
        x: Tensor,
        places: Tensor,
        batches: Sequence[ForwardBatch],
        is_whole: Callable[[int], bool] = lambda index: True,
        kept: Collection[int] = (),
    ) -> list[Tensor]:
        """Return the hidden states behind so many layers as in `kept`, then those behind all, [P, size].

        places:  [2, P], row and column of each patch
        batches: the sequences; a second: those in layers that are not whole (full_batches)
        """
        whole, parts = batches[0], batches[-1]
        self._rotary.enter(whole, places)
        parts.rotations = whole.rotations
        each = (whole if is_whole(i) else parts for i in range(len(self.blocks)))
        states = run_blocks(self.blocks, x, each, kept)
        return [states[index] for index in (*kept, len(self.blocks))]
