"""`MediaProcessor` says what a family makes of items, and what stands for them in a prompt.

What prepares items runs in processes of its own, where nothing is known but the settings; the rest in the API
process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from octavo.base.errors import RequestError

Settings = Mapping[str, Any]
Arrays = dict[str, np.ndarray]
Encode = Callable[[str], list[int]]
"""Takes a text with special tokens; returns its ids, with none added."""


class MediaProcessor(ABC):
    """Reads the model's configs once.

    DEFAULTS: what transformers assumes where preprocessor_config.json is silent
    OPTIONS:  settings that a request may replace (mm_processor_kwargs)
    """

    DEFAULTS: ClassVar[Settings]
    OPTIONS: ClassVar[frozenset[str]] = frozenset()
    OVERRIDES: ClassVar[Settings] = {}
    """What transformers' processor of text and media says, whatever preprocessor_config.json does."""
    SETTINGS: ClassVar[str] = "image_processor"
    """Where processor_config.json has the settings."""
    sees_itself: ClassVar[bool] = False
    """Tokens of an item attend to later ones of the same item."""
    is_source: ClassVar[bool] = False
    """The item is what an encoder-decoder's encoder reads: nothing stands for it in the prompt."""
    VIDEO_DEFAULTS: ClassVar[Settings | None] = None
    """The same of videos; None = the family takes none."""
    VIDEO_OPTIONS: ClassVar[frozenset[str]] = frozenset({"num_frames", "fps"})

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        """Read the model's config; settings: of preprocessor_config.json. Raises BadCheckpoint."""
        self.config, self.encode = config, encode
        self.placeholder_id = self.marker_id = -1
        """The first is a token whose embedding is replaced, once for each output of the encoder; the second
        stands in a prompt for one item, until it is replaced by `tokens`."""
        self.settings: Settings = {**self.DEFAULTS, **{k: v for k, v in settings.items() if v is not None}}
        self.video_settings: Settings = {}
        self.video_id: int | None = None
        """Stands for a video, as marker and as placeholder; None = there are none."""
        self.video_frame: tuple[int, int] | None = None
        """Tokens around a video's marker that `video_tokens` replaces, too."""
        self.num_deep_layers = 0
        """So often the encoder's outputs are as wide again as an embedding."""
        self.hearing: MediaProcessor = self
        """What hears, in a model that sees, too."""

    @property
    @abstractmethod
    def markers(self) -> dict[int, str]:
        """What stands in a prompt for an item, and of which modality that is."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """What prompts may hold beside text."""
        return tuple(self.markers.values())

    def placeholder(self, modality: str) -> int:
        """Return the token whose embeddings are those of an item."""
        return self.placeholder_id

    def beside(self, modalities: frozenset[str]) -> Settings:
        """Return settings of items that depend on which modalities a prompt has."""
        return {}

    @classmethod
    def options(cls) -> frozenset[str]:
        """Return the settings that a request may replace."""
        return cls.OPTIONS | (frozenset() if cls.VIDEO_DEFAULTS is None else cls.VIDEO_OPTIONS)

    @abstractmethod
    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        """Return the tokens that stand for a prepared item; of a source, one per encoder output."""

    def read_embeds(self, modality: str, count: int, told: Mapping[str, Any]) -> tuple[list[int], Arrays]:
        """Return the tokens of `count` given outputs of the encoder, and what positions need beside them.

        told: what came with them. Raises RequestError.
        """
        if modality == "video" or self.is_source:
            raise RequestError(f"This model takes no {modality}_embeds.", f"{modality}_embeds")
        return self.tokens_of_embeds(count), {}

    def token_of(self, text: str) -> int | None:
        """Return the token that a mark of the tokenizer is; None where it has none."""
        try:
            ids = self.encode(text)
        except RequestError:
            return None
        return ids[0] if len(ids) == 1 else None

    def tokens_of_embeds(self, count: int) -> list[int]:
        """Return the tokens that stand for `count` given outputs of the encoder."""
        return [self.placeholder_id] * count

    def joined(self, left: int, right: int) -> int | None:
        """Return the token that two at the edge of an item are together; None if they stay two."""
        return None
