"""Images in messages: where they are found, and that texts stay texts."""

import numpy as np
import pytest
from PIL import Image

from octavo.base.errors import RequestError
from octavo.frontend.media.conversation import BREAK, take_media
from octavo.frontend.media.inputs import MediaURL, read_inputs

MARK = "<image>"
MARKERS = {"image": MARK, "video": "<video>"}
URL = "https://example.com/a.png"


def parts(*content):
    return [{"role": "user", "content": list(content)}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"image_url": URL},
    ],
)
def test_spellings(part):
    taken = take_media(parts({"type": "text", "text": "What?"}, part), MARKERS, as_parts=True)
    assert taken.items == {"image": [MediaURL(URL)]}
    assert taken.messages[0]["content"] == [{"type": "text", "text": "What?"}, {"type": "image"}]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("image_pil", Image.new("RGB", (8, 8))),
        ("image", np.zeros((8, 8, 3), np.uint8)),
        ("image_embeds", np.zeros((4, 16), np.float32)),
    ],
)
def test_objects(kind, given):
    """Python's callers give pictures and what an encoder made of them, under the type or without it."""
    for part in ({"type": kind, kind: given}, {kind: given}):
        taken = take_media(parts(part), MARKERS, as_parts=True)
        assert list(taken.items) == ["image"] and taken.items["image"][0] is given
        assert taken.messages[0]["content"] == [{"type": "image"}]


def test_templates_of_strings_get_markers_first():
    image = {"type": "image_url", "image_url": URL}
    taken = take_media(parts({"type": "text", "text": "a"}, image, image), MARKERS, as_parts=False)
    assert [part["text"] for part in taken.messages[0]["content"]] == [MARK, MARK, "a"]


@pytest.mark.parametrize("as_parts", [True, False])
def test_a_literal_marker_stays_text(as_parts):
    image = {"type": "image_url", "image_url": URL}
    texts = [{"type": "text", "text": f"is {MARK} text?"}, image]
    taken = take_media([*parts(*texts), {"role": "assistant", "content": MARK}], MARKERS, as_parts=as_parts)
    assert f"is <{BREAK}image> text?" in [part.get("text") for part in taken.messages[0]["content"]]
    assert taken.messages[1]["content"] == f"<{BREAK}image>"


def test_names_without_content():
    taken = take_media(parts({"type": "image_url", "image_url": None, "uuid": "a"}), MARKERS, as_parts=True)
    assert (taken.items, taken.uuids) == ({"image": [None]}, {"image": ["a"]})
    with pytest.raises(RequestError, match="must have its image under 'image_url'"):
        take_media(parts({"type": "image_url"}), MARKERS, as_parts=True)


def test_inputs():
    assert read_inputs({"image": []}, None, None) is None
    assert read_inputs({"image": b"x"}, {"image": "a"}, None).uuids == {"image": ["a"]}
    with pytest.raises(RequestError, match="Unsupported modality: smell"):
        read_inputs({"smell": b"x"}, None, None)
    with pytest.raises(RequestError, match="2 uuids vs 1 items"):
        read_inputs({"image": b"x"}, {"image": ["a", "b"]}, None)
    with pytest.raises(RequestError, match="multi_modal_data must be a dict"):
        read_inputs([b"x"], None, None)
