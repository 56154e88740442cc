"""Files of images: what is read of them, and that broken and huge ones cost an error of ours."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from octavo.base.errors import RequestError
from octavo.frontend.media.child import Question
from octavo.frontend.media.decoding import decode
from octavo.frontend.media.pool import PreparationPool

MOST = 10_000
COLOURS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_of(width, height):
    """A file of few bytes that says it is large."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "WEBP"])
def test_exact_formats(form):
    options = {"lossless": True} if form == "WEBP" else {}
    image = decode(encoded(Image.fromarray(COLOURS), form, **options), MOST)
    np.testing.assert_array_equal(np.asarray(image), COLOURS)


def test_modes():
    """Transparency is over white; palettes, grey and 16 bits become colours; the first frame counts."""
    clear = decode(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0))), MOST)
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    deep = Image.fromarray(np.full((4, 4), 0x8000, np.uint16))
    assert decode(encoded(deep), MOST).getpixel((0, 0)) == (128, 128, 128)
    frames = [Image.new("P", (4, 4), n) for n in (0, 1, 2)]
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(moving, MOST).size == (4, 4)
    assert decode(encoded(Image.new("CMYK", (4, 4)), "JPEG"), MOST).mode == "RGB"


def test_orientation():
    image = Image.new("RGB", (30, 20))
    exif = image.getexif()
    exif[0x0112] = 6
    assert decode(encoded(image, "JPEG", exif=exif), MOST).size == (20, 30)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files(form):
    whole = encoded(Image.fromarray(COLOURS), form)
    for length in (0, 1, 10, len(whole) // 2):
        with pytest.raises(RequestError, match="Failed to load image") as caught:
            decode(whole[:length], MOST)
        assert "0x" not in str(caught.value)


@pytest.mark.parametrize("content", [b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe", b"\0" * 99])
def test_other_files(content):
    with pytest.raises(RequestError, match="none of PNG, JPEG"):
        decode(content, MOST)


def test_bombs():
    with pytest.raises(RequestError, match="50000 x 50000 pixels"):
        decode(png_of(50_000, 50_000), 178_956_970)


def test_processes_come_back():
    """One that takes too long is ended; the next question gets another."""
    pool = PreparationPool(1)
    settings = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    settings |= {"resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    good = encoded(Image.fromarray(COLOURS))

    def ask(content, limit_s=20.0):
        return pool.ask(Question("LlavaForConditionalGeneration", settings, content, 10**9, limit_s))

    try:
        assert ask(good).features["pixel_values"].shape == [1, 3, 28, 28]
        with pytest.raises(RequestError, match=r"took more than 0.001 s"):
            ask(encoded(Image.new("RGB", (8000, 8000))), 0.001)
        with pytest.raises(RequestError, match="damaged"):
            ask(good[:50])
        assert ask(good).features["pixel_values"].num_bytes == 4 * 3 * 28 * 28
    finally:
        pool.close()
