"""`MediaItem`: an image or the like in a prompt, in one form for every modality."""

from collections.abc import Sequence

import msgspec


class Features(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An array as bytes, row by row."""

    dtype: str
    """A name that NumPy and torch share: float32, int64, uint8."""
    shape: list[int]
    data: bytes

    @property
    def num_bytes(self) -> int:
        """Return the size of the array."""
        return len(self.data)


class MediaItem(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What stands at the tokens [start, start + length) of a prompt."""

    modality: str
    start: int
    length: int
    placeholder_id: int
    """Tokens of that range with this id get the encoder's outputs, in order, as their embeddings."""
    key: bytes
    """Digest of content and processing; equal keys have equal features."""
    features: dict[str, Features]
    """What the model's encoder reads; `embeds` alone: its outputs, given by the caller."""
    sees_itself: bool = False
    """Its tokens see each other, later ones too: one step computes them all."""

    @property
    def end(self) -> int:
        """Return the first position behind it."""
        return self.start + self.length


class Source(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What an encoder-decoder's encoder reads; the decoder's tokens attend to it beside themselves."""

    key: bytes
    """Digest of content and processing; equal keys have equal features."""
    num_tokens: int
    """Positions of the encoder's output."""
    features: dict[str, Features]
    token_ids: list[int] = []
    """Of a source that is a text."""


EMBEDS = "embeds"


def block_identities(media: Sequence[MediaItem], block_size: int) -> dict[int, bytes]:
    """Return what distinguishes blocks of equal tokens: by the number of the block in which an item begins.

    Digests of later blocks depend on those before them, so an item enters once: with its place in the block.
    """
    identities: dict[int, bytes] = {}
    for item in media:
        block, offset = divmod(item.start, block_size)
        identities[block] = identities.get(block, b"media") + offset.to_bytes(4, "little") + item.key
    return identities
