"""Media in scripts that import vLLM's functions: what is encoded is fetched as it was."""

import numpy as np
import pytest
from PIL import Image

from octavo import RequestError, Unsupported
from octavo.assets.audio import AudioAsset
from octavo.assets.image import ImageAsset
from octavo.multimodal.image import convert_image_mode
from octavo.multimodal.utils import (
    encode_audio_url,
    encode_image_base64,
    encode_image_url,
    fetch_audio,
    fetch_image,
    fetch_video,
)
from octavo.names import media
from tests.tiny_media import make_images


def test_images(tmp_path):
    [image] = make_images(1)
    assert np.array_equal(fetch_image(encode_image_url(image)), image)
    image.save(tmp_path / "a.png")
    assert np.array_equal(fetch_image((tmp_path / "a.png").as_uri()), image)
    assert encode_image_url(image, format="JPEG").startswith("data:image/jpeg;base64,/9j/")
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert convert_image_mode(clear, "RGB").getpixel((0, 0)) == (255, 255, 255)
    assert convert_image_mode(image, "L").mode == "L" and convert_image_mode(image, "RGB") is image
    assert encode_image_base64(clear, image_mode=None) != encode_image_base64(clear)
    with pytest.raises(RequestError, match="Failed to load image"):
        fetch_image("data:image/png;base64,aaaa")


def test_sounds():
    samples = np.sin(np.arange(3000) / 9).astype(np.float32) / 2
    found, rate = fetch_audio(encode_audio_url(samples, 22050))
    assert rate == 22050 and found.shape == samples.shape and abs(found - samples).max() < 1e-4
    with pytest.raises(Unsupported, match="WAV only"):
        encode_audio_url(samples, 22050, format="MP3")
    with pytest.raises(RequestError, match="Failed to load audio"):
        fetch_audio("data:audio/wav;base64,aaaa")


def test_videos(tmp_path):
    images = [Image.new("RGB", (32, 32), (40 * i, 0, 0)) for i in range(6)]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:], duration=100)
    frames, told = fetch_video((tmp_path / "a.gif").as_uri(), {"num_frames": 3})
    assert frames.shape == (3, 32, 32, 3) and told["frames_indices"] == [0, 2, 5]
    assert told["total_num_frames"] == 6 and told["fps"] == 10


def test_assets_are_fetched_once(tmp_path, monkeypatch):
    [image], fetched = make_images(1), []
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))

    def fetch(door, url):
        fetched.append(url)
        image.save(tmp_path / "x.png")
        return (tmp_path / "x.png").read_bytes()

    monkeypatch.setattr(media.MediaDoor, "fetch", fetch)
    asset = ImageAsset("stop_sign")
    assert np.array_equal(asset.pil_image_ext("png"), image) and asset.read_bytes("png")[1:4] == b"PNG"
    assert fetched == [f"{media._ASSETS}/vision_model_images/stop_sign.png"]
    assert AudioAsset("winning_call").get_local_path().name == "winning_call.ogg" and len(fetched) == 2
