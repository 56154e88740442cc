"""What prompts with images may say, how they are cached, and what the engine gets of them."""

import base64
import json
import threading
from hashlib import sha256
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError, RequestError
from octavo.frontend.media import identity
from octavo.frontend.media.door import MediaDoor
from octavo.frontend.media.inputs import MediaInputs, MediaURL
from tests.tiny_media import IMAGE, TINY_MEDIA, make_images, make_oracle, save

LLAVA = "LlavaForConditionalGeneration"
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
IDS = [5, 6, IMAGE, 7, 8, 9, *range(10, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_oracle(LLAVA), LLAVA, tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=256,
        limit_mm_per_prompt={"image": 2},
        enable_mm_embeds=True,
    )


def prompt(*images, ids=IDS, **entries):
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": list(images)}, **entries}


def run(llm, *prompts):
    return llm.generate(list(prompts), PARAMS, use_tqdm=False)


def part_of(llm):
    worker = llm.llm_engine.core.client._core._executor._worker
    return worker._media


def reader_of(llm):
    return llm.llm_engine.input_processor.media.reader


def test_limits(llm):
    images = make_images(3)
    with pytest.raises(RequestError, match=r"At most 2 image\(s\) may be provided in one prompt."):
        run(llm, prompt(*images, ids=[IMAGE] * 3))
    with pytest.raises(RequestError, match=r"The prompt has 2 image placeholder\(s\), but 1 image\(s\)"):
        run(llm, prompt(images[0], ids=[IMAGE, 5, IMAGE]))
    with pytest.raises(RequestError, match=r"The prompt has 0 image placeholder\(s\)"):
        run(llm, prompt(images[0], ids=[5]))
    for wrong in ("text", np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8), 7):
        with pytest.raises(RequestError, match="An image must be one of Pillow's"):
            run(llm, prompt(wrong))


def test_forms_are_equal(llm):
    [image] = make_images(1)
    array = np.asarray(image)
    forms = [image, array, np.moveaxis(array, -1, 0), torch.from_numpy(array.copy())]
    outputs = [run(llm, prompt(form))[0].outputs[0].token_ids for form in forms]
    assert outputs == [outputs[0]] * len(forms)


@pytest.fixture
def batches(llm, monkeypatch):
    """How many images the encoder takes together, run by run."""
    seen, encode = [], part_of(llm)._shared

    def noted(items, **how):
        seen.append(len(items))
        return encode(items, **how)

    monkeypatch.setattr(part_of(llm), "_shared", noted)
    return seen


def test_a_repeated_image_is_not_encoded_again(llm, batches):
    [image] = make_images(1, seed=7)
    first = run(llm, prompt(image))[0]
    assert batches == [1]
    again = run(llm, prompt(image))[0]
    assert batches == [1] and again.num_cached_tokens >= 16
    other_text = run(llm, prompt(image, ids=[90, *IDS]))[0]
    assert batches == [1] and other_text.num_cached_tokens == 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_images_of_many_requests_are_one_batch(llm, batches):
    before = {metric.name: metric.value for metric in llm.get_metrics() if "mm_encoder" in metric.name}
    run(llm, *(prompt(image) for image in make_images(16, seed=3)))
    assert max(batches) >= 8 and sum(batches) == 16
    counts = {metric.name: metric.value for metric in llm.get_metrics() if "mm_encoder" in metric.name}
    assert counts["vllm:mm_encoder_items"] - before["vllm:mm_encoder_items"] == 16
    assert counts["vllm:mm_encoder_batches"] - before["vllm:mm_encoder_batches"] == len(batches)


def test_images_of_many_prompts_are_prepared_side_by_side(llm, monkeypatch):
    """Two wait for each other there; equal ones are prepared once, and a name finds what came before."""
    processor, both, prepared = type(reader_of(llm).processor), threading.Barrier(2), []

    def meeting(image, settings):
        both.wait(timeout=20)
        prepared.append(image)
        return prepare(image, settings)

    monkeypatch.setattr("octavo.frontend.requests.media.usable_cores", lambda: 4)
    one, other = make_images(2, seed=23)
    with monkeypatch.context() as patch:
        prepare = processor.prepare
        patch.setattr(processor, "prepare", staticmethod(meeting))
        outputs = run(llm, *(prompt(image) for image in (one, other, one.copy(), other.copy())))
    assert len(prepared) == 2
    assert [o.outputs[0].token_ids for o in outputs[2:]] == [o.outputs[0].token_ids for o in outputs[:2]]
    named = {"multi_modal_uuids": {"image": ["a new name"]}}
    first, again, _ = run(llm, prompt(one, **named), prompt(None, **named), prompt(other))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_every_byte_of_a_large_image_counts(llm):
    """A pixel anywhere tells images apart."""
    images, black = [], np.zeros((900, 700, 3), np.uint8)
    for row, column in ((None, None), (0, 0), (450, 0), (899, 699)):
        images.append(black.copy())
        if row is not None:
            images[-1][row, column] = 1
    keys = [one.key for one in reader_of(llm).read(MediaInputs({"image": images[:2]}), "")]
    keys += [one.key for one in reader_of(llm).read(MediaInputs({"image": images[2:]}), "")]
    assert len(set(keys)) == 4
    [again] = reader_of(llm).read(MediaInputs({"image": [Image.fromarray(images[2]).copy()]}), "")
    [same] = reader_of(llm).read(MediaInputs({"image": [Image.fromarray(images[2])]}), "")
    assert again.key == same.key


def test_a_known_file_is_compared_instead_of_decoded_and_hashed(llm, monkeypatch):
    """Of two files that differ in one place, each is itself; as bytes, too, and under another salt."""
    door, hashed, decoded = MediaDoor._decode, [], []
    monkeypatch.setattr(MediaDoor, "_decode", lambda self, url: decoded.append(url) or door(self, url))
    monkeypatch.setattr(identity, "sha256", lambda: hashed.append(1) or sha256())
    files = []
    for level in (0, 1):
        pixels = np.zeros((600, 600, 3), np.uint8)
        pixels[301, 77, 1] = level
        files.append(BytesIO())
        Image.fromarray(pixels).save(files[-1], "BMP")
    urls = [f"data:image/bmp;base64,{base64.b64encode(file.getvalue()).decode()}" for file in files]
    assert identity._sample((urls[0],), "") == identity._sample((urls[1],), "")

    def keys(*items, salt=""):
        del hashed[:], decoded[:]
        return [one.key for one in reader_of(llm).read(MediaInputs({"image": items}), salt)]

    [first] = keys(MediaURL(urls[0]))
    assert len(decoded) == 1 and len(hashed) == 2
    assert keys(MediaURL(urls[0][:9] + urls[0][9:])) == [first]
    assert not decoded and len(hashed) == 1, "only the digest and the settings"
    [second] = keys(MediaURL(urls[1]))
    assert second != first and len(decoded) == 1
    assert keys(*(file.getvalue() for file in files)) == [first, second]
    assert keys(MediaURL(urls[1]), salt="other") == [second] and len(decoded) == 1
    llm.reset_mm_cache()
    assert keys(MediaURL(urls[1])) == [second] and len(decoded) == 1


def test_identities_are_bounded():
    known = identity.Identities(max_bytes=10_000)
    for number in range(100):
        known.of((b"%d" % number,), "", lambda part: part)
    assert known.find((b"99",), "") == b"99" and known.find((b"9",), "") is None
    assert known.find((b"99",), "salt") is None
    known.of((b"x" * 20_000,), "", lambda part: part[:1])
    assert known.find((b"x" * 20_000,), "") is None


def test_images_of_equal_size_share_no_blocks(llm):
    black, white = Image.new("RGB", (40, 40)), Image.new("RGB", (40, 40), "white")
    first, second = run(llm, prompt(black))[0], run(llm, prompt(white))[0]
    assert first.prompt_token_ids == second.prompt_token_ids
    assert second.num_cached_tokens == 0
    assert run(llm, prompt(white))[0].num_cached_tokens > 0
    moved = run(llm, prompt(white, mm_processor_kwargs={"do_normalize": False}))[0]
    assert moved.num_cached_tokens == 0
    assert run(llm, prompt(white, cache_salt="other"))[0].num_cached_tokens == 0


def test_names(llm):
    """A name stands for what came with it first, under the same salt."""
    black, white = Image.new("RGB", (44, 44)), Image.new("RGB", (44, 44), "white")
    named = {"multi_modal_uuids": {"image": ["a name"]}}
    first = run(llm, prompt(black, **named))[0].outputs[0].token_ids
    assert run(llm, prompt(None, **named))[0].outputs[0].token_ids == first
    assert run(llm, prompt(white, **named))[0].outputs[0].token_ids == first
    with pytest.raises(RequestError, match="'a name' is not in the cache"):
        run(llm, prompt(None, cache_salt="x", **named))
    with pytest.raises(RequestError, match="given, or named by a uuid"):
        run(llm, prompt(None))
    llm.reset_mm_cache()
    with pytest.raises(RequestError, match="send its content"):
        run(llm, prompt(None, **named))


def test_processor_kwargs(llm, folder):
    [image] = make_images(1, seed=9)
    plain = run(llm, prompt(image))[0]
    other = llm.generate(prompt(image), PARAMS, mm_processor_kwargs={"do_center_crop": True}, use_tqdm=False)
    assert other[0].outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(RequestError, match=r"Unknown mm_processor_kwargs smell\. Known: crop_size"):
        run(llm, prompt(image, mm_processor_kwargs={"smell": 1}))
    with pytest.raises(RequestError, match="cannot be prepared with these mm_processor_kwargs"):
        run(llm, prompt(image, mm_processor_kwargs={"size": "large"}))
    with pytest.raises(ConfigError, match="Unknown mm_processor_kwargs smell"):
        LLM(str(folder), skip_tokenizer_init=True, mm_processor_kwargs={"smell": 1})


def test_embeddings(llm):
    """What the encoder makes of an image, given in its place, gives the same text."""
    [image] = make_images(1, seed=11)
    expected = run(llm, prompt(image))[0]
    embeds = next(reversed(part_of(llm).cache._entries.values()))[0]
    given = run(llm, prompt(embeds.clone()))[0]
    assert given.outputs[0].token_ids == expected.outputs[0].token_ids
    batch = {"prompt_token_ids": IDS, "multi_modal_data": {"image": embeds[None].clone()}}
    assert run(llm, batch)[0].outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(RequestError, match=r"shape \(num_tokens, 48\) for this model, got \(4, 7\)"):
        run(llm, prompt(torch.zeros(4, 7)))


def test_children_share_their_images(llm, batches):
    [image] = make_images(1, seed=13)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=4, seed=1)
    outputs = llm.generate([prompt(image)], params, use_tqdm=False)[0].outputs
    assert len(outputs) == 3 and batches == [1]


def test_settings_of_the_model(folder):
    assert json.loads((folder / "preprocessor_config.json").read_text()) == TINY_MEDIA[LLAVA].settings


def test_encoded_files(llm, tmp_path):
    """Bytes are decoded by another process, to the same numbers."""
    [image] = make_images(1, seed=15)
    path = tmp_path / "a.png"
    image.save(path)
    expected = run(llm, prompt(image))[0].outputs[0].token_ids
    assert run(llm, prompt(path.read_bytes()))[0].outputs[0].token_ids == expected
