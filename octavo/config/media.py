"""Options of images in prompts: where they may come from, how large they may be, what is kept."""

from dataclasses import dataclass
from typing import Any

from octavo.config.option import Concern, option


@dataclass(frozen=True, kw_only=True)
class MediaConfig(metaclass=Concern):
    """What a model for images takes. Models for text alone read none of it."""

    mmproj: str = option(
        "",
        "File with the encoder of a model in a GGUF file; empty = the only mmproj*.gguf beside it, if there "
        "is one; none = text alone.",
    )
    limit_mm_per_prompt: dict[str, Any] = option(
        {}, 'Items of each modality in a prompt at most: {"image": 4}; others have no limit but the context.'
    )
    mm_processor_kwargs: dict[str, Any] = option(
        {},
        "Entries that replace those of the model's preprocessor_config.json; requests may replace them too.",
    )
    enable_mm_embeds: bool = option(
        False, "Take the outputs of the model's encoder in place of images (image_embeds)."
    )
    allowed_local_media_path: str = option(
        "", "Folder whose files may be named by file: URLs; empty = none. Every client can read it."
    )
    allowed_media_domains: list[str] = option(
        [], "Hosts that images may be fetched from; empty = any public one."
    )
    allow_private_media_hosts: bool = option(
        False, "Fetch from private, loopback and link-local addresses, too."
    )
    media_fetch_timeout: float = option(5.0, "Seconds that fetching a file may take, redirects included.")
    media_io_kwargs: dict[str, Any] = option(
        {},
        'How files are read: {"video": {"num_frames": 32, "fps": -1}} takes 32 frames of each, evenly; fps = '
        "so many of a second at most; -1 = all.",
    )
    max_video_bytes: int = option(256 * 2**20, "Largest file of a video, as it is stored.")
    max_video_seconds: float = option(600.0, "Longest video; longer ones are refused.")
    max_video_frames: int = option(768, "Most frames that are taken of a video.")
    video_fetch_timeout: float = option(30.0, "Seconds that fetching a video may take.")
    audio_fetch_timeout: float = option(10.0, "Seconds that fetching a sound may take.")
    media_decode_timeout: float = option(30.0, "Seconds that decoding and resizing an image may take.")
    max_media_bytes: int = option(64 * 2**20, "Largest file of an image, as it is stored.")
    max_image_pixels: int = option(178_956_970, "Most pixels of an image; larger ones are not decoded.")
    max_audio_seconds: float = option(3600.0, "Longest audio; decoding ends there with an error.")
    media_processes: int = option(
        0, "Processes that decode and resize images of servers; 0 = one for each two cores, 4 at most."
    )
    mm_processor_cache_gb: float = option(
        4.0,
        "GiB of host memory in the API process for images that are prepared already; a quarter is for the "
        "files by which they are found again. 0 = none.",
    )
    mm_encoder_tp_mode: str = option(
        "weights",
        "How several GPUs encode: each has a part of the encoder's weights, or all of them and a part of the "
        "images.",
        ("weights", "data"),
    )
    mm_encoder_cache_gb: float = option(
        1.0, "GiB of the device's memory for outputs of the encoder; 0 = an image is encoded for each chunk."
    )
