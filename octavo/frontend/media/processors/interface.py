"""`ImageProcessor` says what a family makes of an image, and what stands for it in a prompt.

A further family is one file here and a line in `registry`. `prepare` runs in processes of its own, where
nothing is known but the settings; the rest in the API process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from octavo.base.errors import BadCheckpoint
from octavo.frontend.media.video import VideoInfo

Settings = Mapping[str, Any]
Arrays = dict[str, np.ndarray]
Encode = Callable[[str], list[int]]
"""Takes a text with special tokens; returns its ids, with none added."""

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
"""Of Pillow."""


class ImageProcessor(ABC):
    """Reads the model's configs once.

    DEFAULTS: what transformers assumes where preprocessor_config.json is silent
    OPTIONS:  settings that a request may replace (mm_processor_kwargs)
    """

    DEFAULTS: ClassVar[Settings]
    OPTIONS: ClassVar[frozenset[str]] = frozenset(
        {
            "do_resize",
            "do_rescale",
            "do_normalize",
            "rescale_factor",
            "image_mean",
            "image_std",
            "size",
            "resample",
        }
    )
    OVERRIDES: ClassVar[Settings] = {}
    """What transformers' processor of text and images says, whatever preprocessor_config.json does."""
    sees_itself: ClassVar[bool] = False
    """Tokens of an image attend to later ones of the same image."""
    VIDEO_DEFAULTS: ClassVar[Settings | None] = None
    """The same of videos; None = the family takes none."""
    VIDEO_OPTIONS: ClassVar[frozenset[str]] = frozenset({"num_frames", "fps"})

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        """Read the model's config; settings: of preprocessor_config.json. Raises BadCheckpoint."""
        self.config, self.encode = config, encode
        given = config.get("image_token_id", config.get("image_token_index"))
        if not isinstance(given, int):
            raise BadCheckpoint("The config does not name the token that stands for images (image_token_id).")
        self.placeholder_id: int = given
        """Its embedding is replaced, once for each output of the encoder."""
        self.marker_id: int = given
        """Stands in a prompt for one image, until it is replaced by `tokens`."""
        self.settings: Settings = {**self.DEFAULTS, **{k: v for k, v in settings.items() if v is not None}}
        self.video_settings: Settings = {}
        self.video_id: int | None = None
        """Stands for a video, as marker and as placeholder; None = there are none."""
        self.video_frame: tuple[int, int] | None = None
        """Tokens around a video's marker that `video_tokens` replaces, too."""
        self.num_deep_layers = len(config["vision_config"].get("deepstack_visual_indexes") or ())
        """So often the encoder's outputs are as wide again as an embedding."""

    def read_video_settings(self, settings: Settings) -> None:
        """Read video_preprocessor_config.json, or preprocessor_config.json where there is none."""
        self.video_settings = {**(self.VIDEO_DEFAULTS or {}), **settings}

    @property
    def markers(self) -> dict[int, str]:
        """What stands in a prompt for an item, and of which modality that is."""
        return {self.marker_id: "image"} | ({} if self.video_id is None else {self.video_id: "video"})

    def placeholder(self, modality: str) -> int:
        """Return the token whose embeddings are those of an item."""
        return self.placeholder_id if self.video_id is None or modality == "image" else self.video_id

    @classmethod
    def options(cls) -> frozenset[str]:
        """Return the settings that a request may replace."""
        return cls.OPTIONS | (frozenset() if cls.VIDEO_DEFAULTS is None else cls.VIDEO_OPTIONS)

    @staticmethod
    @abstractmethod
    def prepare(image: Image.Image, settings: Settings) -> Arrays:
        """Return what the encoder reads of an RGB image."""

    @staticmethod
    def prepare_video(frames: list[Image.Image], video: VideoInfo, settings: Settings) -> Arrays:
        """Return what the encoder reads of frames of one size."""
        raise NotImplementedError

    def video_tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        """Return the tokens that stand for a prepared video."""
        raise NotImplementedError

    @abstractmethod
    def tokens(self, arrays: Mapping[str, np.ndarray]) -> list[int]:
        """Return the tokens that stand for a prepared image."""

    def tokens_of_embeds(self, count: int) -> list[int]:
        """Return the tokens that stand for `count` given outputs of the encoder."""
        return [self.placeholder_id] * count

    def joined(self, left: int, right: int) -> int | None:
        """Return the token that two at the edge of an item are together; None if they stay two."""
        return None
