"""`ImageProcessor` says what a family makes of an image, and what stands for it in a prompt.

A further family is one file here and a line in `registry`. `prepare` runs in processes of its own, where
nothing is known but the settings; the rest in the API process.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from octavo.base.errors import BadCheckpoint
from octavo.frontend.media.processors.media import Arrays as Arrays  # noqa: PLC0414  # for families
from octavo.frontend.media.processors.media import Encode as Encode  # noqa: PLC0414
from octavo.frontend.media.processors.media import MediaProcessor
from octavo.frontend.media.processors.media import Settings as Settings  # noqa: PLC0414
from octavo.frontend.media.video import VideoInfo

BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
"""Of Pillow."""
CLIP: dict[str, Any] = {
    "resample": BICUBIC,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF: dict[str, Any] = {"resample": BICUBIC, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
"""How most families resize and normalise."""


class ImageProcessor(MediaProcessor):
    """Replaces the token that stands for an image in the config."""

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

    def __init__(self, config: Settings, settings: Settings, encode: Encode) -> None:
        super().__init__(config, settings, encode)
        given = config.get("image_token_id", config.get("image_token_index"))
        if not isinstance(given, int):
            raise BadCheckpoint("The config does not name the token that stands for images (image_token_id).")
        self.marker_id, self.placeholder_id = given, config.get("image_placeholder_id", given)
        self.num_deep_layers = len(config["vision_config"].get("deepstack_visual_indexes") or ())

    def read_video_settings(self, settings: Settings) -> None:
        """Read video_preprocessor_config.json, or preprocessor_config.json where there is none."""
        self.video_settings = {**(self.VIDEO_DEFAULTS or {}), **settings}

    @property
    def markers(self) -> dict[int, str]:
        own = {self.marker_id: "image"} | ({} if self.video_id is None else {self.video_id: "video"})
        return own if self.hearing is self else own | self.hearing.markers

    def placeholder(self, modality: str) -> int:
        if modality == "audio":
            return self.hearing.placeholder_id
        return self.placeholder_id if self.video_id is None or modality == "image" else self.video_id

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
