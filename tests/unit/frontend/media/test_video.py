"""Videos: which frames are taken, what is refused, and that no file is too much."""

import numpy as np
import pytest

from octavo.base.errors import RequestError
from octavo.frontend.media.inputs import read_inputs
from octavo.frontend.media.video import VideoLimits, decode_video, to_video
from tests.tiny_media import make_images, make_video

LIMITS = VideoLimits(16, 60, 10**6)


@pytest.mark.parametrize(
    ("num_frames", "fps", "expected"),
    [(4, -1, [0, 6, 12, 19]), (4, 1, [0, 19]), (-1, 2, [0, 6, 12, 19]), (1, -1, [0])],
)
def test_frames_are_taken_evenly(num_frames, fps, expected):
    """As vLLM takes them, of 20 frames of two seconds."""
    frames, info = decode_video(make_video(), VideoLimits(16, 60, 10**6, num_frames, fps))
    assert info.indices == expected and (info.fps, info.num_frames) == (10, 20)
    shades = [np.asarray(frame).mean() for frame in frames]
    assert shades == pytest.approx([8 * number for number in expected], abs=4)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (VideoLimits(16, 60, 10**6), "20 frames is too long: at most max_video_frames=16"),
        (VideoLimits(99, 1, 10**6), "lasts 2 s; at most max_video_seconds=1"),
        (VideoLimits(99, 60, 3000), "64 x 48 pixels; at most max_image_pixels=3000"),
    ],
)
def test_limits(limits, said):
    with pytest.raises(RequestError, match=said) as caught:
        decode_video(make_video(), limits)
    assert caught.value.parameter == "video_url"


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile /etc/passwd\n"


@pytest.mark.parametrize(
    "content",
    [b"", b"text", PLAYLIST, CONCAT, b"v=0\nm=video 5004 RTP/AVP 96\n", make_video()[:400], b"\0" * 5000],
)
def test_what_is_no_video(content):
    """Playlists, which would name further files, are as little a video as noise is."""
    with pytest.raises(RequestError, match=r"^Failed to load video: the file is damaged, or of a kind"):
        decode_video(content, LIMITS)


def test_frames_of_python():
    frames = make_images(1) * 3
    array = np.stack([np.asarray(frame) for frame in frames])
    for given in (
        frames,
        array,
        (array, {"fps": 2.0, "total_num_frames": 30, "frames_indices": [0, 10, 20]}),
    ):
        [video] = read_inputs({"video": given}, None, None).items["video"]
        taken, info = to_video(video, LIMITS)
        assert len(taken) == 3 and info.sampled_fps == (0.2 if isinstance(given, tuple) else 24)
    assert len(read_inputs({"video": [array, array]}, None, None).items["video"]) == 2
    with pytest.raises(RequestError, match="all of one size"):
        to_video(make_images(2), LIMITS)
    with pytest.raises(RequestError, match="17 frames is too long"):
        to_video(make_images(1) * 17, LIMITS)
    with pytest.raises(RequestError, match="frames_indices must name each frame"):
        to_video((array, {"frames_indices": [1]}), LIMITS)
