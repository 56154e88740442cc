"""`EncoderGraphs` has images and the like encoded; on a GPU, batches whose sizes come up again are captured.

Called by MediaPart. What sizes decide reaches the device once for such a batch, and stays there beside its
graph. The graphs share one piece of memory and are few: pictures of one size mostly come one at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.base.lru import LRU
from octavo.runtime.models.media import SIZES, Features, ImageEncoder, ItemEncoder
from octavo.runtime.platforms.platform import Capture
from octavo.runtime.transfer import Array, Send, send

Inputs = dict[str, Tensor]
_MOST_NUMBERS = 4 << 20
"""Of the inputs of a captured batch: larger ones keep a GPU busy for longer than the host needs to launch."""
_MOST_BATCHES = 16


@dataclass(slots=True)
class _Batch:
    """What is known of batches of some sizes. replay: None as long as there was only one"""

    sent: list[list[Tensor]] = field(default_factory=list)
    """What sizes decide, as it came to the device."""
    inputs: list[Inputs] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    replay: Callable[[], None] | None = None

    def send(self, arrays: list[Array], device: torch.device) -> list[Tensor]:
        """Send, and remember it."""
        self.sent.append(send(arrays, device))
        return self.sent[-1]


class EncoderGraphs:
    """Encodes with an encoder that may change its place, of which `clear` has to be told."""

    def __init__(self, encoder: Callable[[], ItemEncoder], capture: Capture | None) -> None:
        """capture: None = nothing is captured"""
        self._encoder, self._capture = encoder, capture
        self._known: LRU[Any, _Batch] = LRU(_MOST_BATCHES)

    def clear(self) -> None:
        """Forget all graphs, and give their memory back."""
        self._known.clear()

    def encode(self, items: Sequence[Inputs], *, captures: bool = True) -> list[Tensor]:
        """See ItemEncoder.encode; the results are the caller's. captures: an adapter's batches are not"""
        encoder, numbers = self._encoder(), sum(each.numel() for item in items for each in item.values())
        is_known = isinstance(encoder, ImageEncoder) and not any("input_features" in item for item in items)
        if not captures or self._capture is None or numbers > _MOST_NUMBERS or not is_known:
            return encoder.encode([_normalised(item, encoder) for item in items])
        key = tuple(tuple(_size(*pair) for pair in sorted(item.items())) for item in items)
        if (batch := self._known.get(key)) is None:
            self._known.put(key, batch := _Batch(), 1)
            return self._compute(items, batch.send)
        if batch.replay is None:
            batch.inputs = [{n: x if n in SIZES else x.clone() for n, x in item.items()} for item in items]
            batch.replay = self._capture(lambda: self._compute_again(batch))
        else:
            for kept, item in zip(batch.inputs, items, strict=True):
                for name in kept.keys() - SIZES:
                    kept[name].copy_(item[name])
        batch.replay()
        return [output.clone() for output in batch.outputs]

    def _compute(self, items: Sequence[Inputs], send: Send) -> list[Tensor]:
        encoder = self._encoder()
        assert isinstance(encoder, ImageEncoder)
        return encoder.see([_normalised(item, encoder) for item in items], send)

    def _compute_again(self, batch: _Batch) -> None:
        known = iter(batch.sent)
        batch.outputs = self._compute(batch.inputs, lambda arrays, device: next(known))


@torch.inference_mode()
def encode_sample(encoder: ItemEncoder, device: torch.device) -> None:
    """Encode what is as large as the largest batch that may be captured: its memory is measured."""
    if isinstance(encoder, ImageEncoder):
        encoder.encode([_normalised(encoder.sample(_MOST_NUMBERS, device), encoder)])


def _size(name: str, given: Tensor) -> tuple[Any, ...]:
    """Return what a plan and launches depend on."""
    return name, given.dtype, tuple(given.shape), tuple(given.tolist()) if name in SIZES else ()


def _normalised(inputs: Features, encoder: ItemEncoder) -> Inputs:
    """Look up what pixels of uint8 become, in a table of each channel, their second axis."""
    inputs = dict(encoder.pixels(inputs))
    if (levels := inputs.get("levels")) is None:
        return inputs
    pixels = inputs["pixel_values"]
    places = pixels.int() + 256 * torch.arange(3, device=pixels.device).view(3, *[1] * (pixels.ndim - 2))
    return inputs | {"pixel_values": levels.to(encoder.compute_dtype).flatten()[places]}
