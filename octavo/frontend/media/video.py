"""A video becomes some of its frames, or an error with a text of ours. PyAV reads the files.

Only containers of one file are opened: playlists would name further addresses. Sampling is vLLM's.
"""

import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from octavo.base.errors import RequestError
from octavo.frontend.media.objects import to_image

_CONTAINERS = {
    "format_whitelist": "mov,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif",
    "protocol_whitelist": "none",
}
_NAME = "video_url"


class VideoLimits(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What of a video is read, and what is refused."""

    max_frames: int
    max_seconds: float
    max_pixels: int
    num_frames: int = -1
    """Frames to take, evenly; -1 = all."""
    fps: float = -1
    """Frames of a second at most; -1 = any."""

    def chosen(self, total: int, fps: float) -> list[int]:
        """Return the numbers of the frames to take of so many. Raises RequestError."""
        count = total if self.num_frames <= 0 else min(self.num_frames, total)
        if self.fps > 0 and fps > 0:
            count = min(count, math.floor(total / fps * self.fps))
        return self.checked(np.linspace(0, total - 1, max(1, count), dtype=np.int64).tolist())

    def checked(self, indices: list[int]) -> list[int]:
        """Return them, if they are not too many. Raises RequestError."""
        if len(indices) > self.max_frames:
            raise RequestError(
                f"A video of {len(indices)} frames is too long: at most max_video_frames={self.max_frames} "
                "are allowed. Sample fewer (num_frames, fps).",
                _NAME,
            )
        return indices


class VideoInfo(msgspec.Struct, frozen=True):
    """Says what was taken. fps, num_frames: of the whole video; indices: of the frames taken"""

    fps: float
    num_frames: int
    indices: list[int]

    @property
    def sampled_fps(self) -> float:
        """Return how many frames of a second were taken."""
        return len(self.indices) / self.num_frames * self.fps


def decode_video(content: bytes, limits: VideoLimits) -> tuple[list[Image.Image], VideoInfo]:
    """Return the frames that are taken, and which they are. Raises RequestError."""
    try:
        import av  # images alone need none of it
    except ImportError:
        raise RequestError("Videos need PyAV: install octavo[media] on the server.", _NAME) from None
    av.logging.set_level(None)
    try:
        with av.open(BytesIO(content), options=_CONTAINERS) as container:
            return _decoded(container, limits)
    except RequestError:
        raise
    except MemoryError:
        raise RequestError("Failed to load video: it needs too much memory.", _NAME) from None
    except (av.error.FFmpegError, ArithmeticError, LookupError, OSError, TypeError, ValueError):
        raise RequestError(
            "Failed to load video: the file is damaged, or of a kind that is not read.", _NAME
        ) from None


def _decoded(container: Any, limits: VideoLimits) -> tuple[list[Image.Image], VideoInfo]:
    stream = container.streams.video[0]
    fps, total = float(stream.average_rate or stream.guessed_rate or 24), stream.frames
    if stream.width * stream.height > limits.max_pixels:
        raise RequestError(
            f"The video has {stream.width} x {stream.height} pixels; at most max_image_pixels="
            f"{limits.max_pixels} are allowed.",
            _NAME,
        )
    if not total:
        total = sum(packet.size > 0 for packet in container.demux(stream))
        container.seek(0)
    if total > limits.max_seconds * fps:
        raise RequestError(
            f"The video lasts {total / fps:.0f} s; at most max_video_seconds={limits.max_seconds:g} are "
            "allowed.",
            _NAME,
        )
    indices = limits.chosen(total, fps)
    wanted, taken = set(indices), {}
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            taken[number] = frame.to_image().rotate(getattr(frame, "rotation", 0), expand=True)
        if number >= indices[-1]:
            break
    found = sorted(taken)
    return [taken[number] for number in found], VideoInfo(fps, total, found)


def to_video(value: Any, limits: VideoLimits) -> tuple[list[Image.Image], VideoInfo]:
    """Return the frames of a list of images or an array [T, H, W, 3] of uint8, perhaps with what is known of
    them: (frames, {"fps", "total_num_frames", "frames_indices"}). All are taken. Raises RequestError.
    """
    told: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, told = value
    frames = [to_image(frame) for frame in value]
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1:
        raise RequestError("A video must have frames, all of one size.", "multi_modal_data")
    indices = limits.checked(list(map(int, told.get("frames_indices") or range(len(frames)))))
    total = int(told.get("total_num_frames") or len(frames))
    if len(indices) != len(frames) or total < 1:
        raise RequestError("frames_indices must name each frame of the video.", "multi_modal_data")
    return frames, VideoInfo(float(told.get("fps") or 24), total, indices)
