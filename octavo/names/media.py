"""What vLLM's scripts import to fetch and encode media, and the pictures and sounds of its examples.

They act for a user's own program: any address and local file may be read. Servers read through a `MediaDoor`
with an operator's limits.
"""

import base64
import mimetypes
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from octavo.base import env
from octavo.base.errors import Unsupported
from octavo.config.media import MediaConfig
from octavo.frontend.media.decoding import decode
from octavo.frontend.media.door import MediaDoor

_ASSETS = "https://vllm-public-assets.s3.us-west-2.amazonaws.com"
_CONFIG = MediaConfig(allowed_local_media_path="/", allow_private_media_hosts=True)
_NUM_FRAMES = 32
Array = np.ndarray[Any, Any]


def fetch_image(image_url: str, image_io_kwargs: Mapping[str, Any] | None = None) -> Image.Image:
    """Return the RGB image at an address (http, https, data, file). Raises RequestError."""
    return decode(MediaDoor(_CONFIG, "image").fetch(image_url), _CONFIG.max_image_pixels)


def fetch_audio(audio_url: str, audio_io_kwargs: Mapping[str, Any] | None = None) -> tuple[Array, int]:
    """Return the samples [n] at an address, channels mixed, and their rate. Raises RequestError."""
    return _sound(MediaDoor(_CONFIG, "audio").fetch(audio_url))


def fetch_video(
    video_url: str, video_io_kwargs: Mapping[str, Any] | None = None
) -> tuple[Array, dict[str, Any]]:
    """Return frames [T, H, W, 3] uint8 of the video at an address, and which they are. Raises RequestError.

    video_io_kwargs: num_frames (32; -1 = all) and fps, how many are taken
    """
    from octavo.frontend.media.video import VideoLimits, decode_video

    wanted = {"num_frames": _NUM_FRAMES, **(video_io_kwargs or {})}
    limits = VideoLimits(
        _CONFIG.max_video_frames, _CONFIG.max_video_seconds, _CONFIG.max_image_pixels, **wanted
    )
    frames, info = decode_video(MediaDoor(_CONFIG, "video").fetch(video_url), limits)
    told = {"fps": info.fps, "total_num_frames": info.num_frames, "frames_indices": info.indices}
    return np.stack([np.asarray(frame) for frame in frames]), told


def encode_image_base64(image: Image.Image, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """Return an image as a file in base64. image_mode: Pillow's, to convert it to; None = as it is"""
    file = BytesIO()
    (convert_image_mode(image, image_mode) if image_mode else image).save(file, format)
    return base64.b64encode(file.getvalue()).decode()


def encode_image_url(image: Image.Image, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """Return an image as a data URL."""
    return _data_url(encode_image_base64(image, image_mode=image_mode, format=format), "image", format)


def encode_audio_base64(audio: Array, sampling_rate: int, *, format: str = "WAV") -> str:
    """Return samples [n] from -1 to 1 as a file in base64. Raises Unsupported for what is no WAV."""
    if format.upper() != "WAV":
        raise Unsupported(f"Audio is written as WAV only, got {format!r}.")
    file = BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(int(sampling_rate))
        written.writeframes((np.clip(audio, -1, 1) * 32767).round().astype("<i2").tobytes())
    return base64.b64encode(file.getvalue()).decode()


def encode_audio_url(audio: Array, sampling_rate: int, *, format: str = "WAV") -> str:
    """Return samples as a data URL."""
    return _data_url(encode_audio_base64(audio, sampling_rate, format=format), "audio", format)


def convert_image_mode(image: Image.Image, to_mode: str) -> Image.Image:
    """Return an image in another of Pillow's modes; what is transparent becomes white in RGB."""
    if image.mode == "RGBA" and to_mode == "RGB":
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == to_mode else image.convert(to_mode)


@dataclass(frozen=True)
class ImageAsset:
    """A picture of vLLM's examples, such as "stop_sign" or "cherry_blossom"; downloaded once."""

    name: str
    folder: ClassVar[str] = "vision_model_images"

    @property
    def pil_image(self) -> Image.Image:
        """The picture."""
        return self.pil_image_ext("jpg")

    def pil_image_ext(self, ext: str) -> Image.Image:
        """Return it from a file of this kind."""
        return Image.open(self.get_path(ext))

    def get_path(self, ext: str) -> Path:
        """Return the file here. Raises RequestError if it cannot be fetched."""
        return _asset(self.folder, f"{self.name}.{ext}")

    def read_bytes(self, ext: str) -> bytes:
        """Return the file's content."""
        return self.get_path(ext).read_bytes()


@dataclass(frozen=True)
class AudioAsset:
    """A sound of vLLM's examples: "winning_call" or "mary_had_lamb"; downloaded once."""

    name: str
    folder: ClassVar[str] = "multimodal_asset"

    @property
    def audio_and_sample_rate(self) -> tuple[Array, int]:
        """The samples and their rate."""
        return _sound(self.get_local_path().read_bytes())

    def get_local_path(self) -> Path:
        """Return the file here. Raises RequestError if it cannot be fetched."""
        return _asset(self.folder, f"{self.name}.ogg")

    @property
    def url(self) -> str:
        """Where it comes from."""
        return f"{_ASSETS}/{self.folder}/{self.name}.ogg"


def _asset(folder: str, name: str) -> Path:
    path = env.cache_dir() / "assets" / folder / name
    if not path.exists():
        content = MediaDoor(_CONFIG).fetch(f"{_ASSETS}/{folder}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return path


def _sound(content: bytes) -> tuple[Array, int]:
    from octavo.frontend.media.audio import AudioLimits, decode_audio, native_rate

    rate = native_rate(content)
    return decode_audio(content, AudioLimits(rate, _CONFIG.max_audio_seconds)), rate


def _data_url(content: str, kind: str, format: str) -> str:
    found = mimetypes.types_map.get(f".{format.lower()}", f"{kind}/{format.lower()}")
    return f"data:{found};base64,{content}"
