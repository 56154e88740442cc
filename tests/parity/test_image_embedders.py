"""Models that embed texts and pictures against transformers' classes, through the whole engine."""

from importlib import import_module

import numpy as np
import pytest
import torch
from torch.nn import functional

from octavo import LLM
from octavo.base.errors import RequestError
from octavo.config.pooling import _COLQWEN_FORMS
from octavo.frontend.requests.pooling import encode_prompt
from tests.tiny_image_embedders import CONFIGS, oracle_of
from tests.tiny_media import IMAGE, make_images

TEXTS = ["5 6 7", "8", "9 10 11 12 13 14 15 16 17"]
TOLERANCE = 1e-5
CLIP, SIGLIP, COLQWEN = CONFIGS
PROCESSORS = {
    CLIP: "clip.image_processing_pil_clip:CLIPImageProcessorPil",
    SIGLIP: "siglip.image_processing_pil_siglip:SiglipImageProcessorPil",
    COLQWEN: "qwen2_vl.image_processing_pil_qwen2_vl:Qwen2VLImageProcessorPil",
}


def make_llm(architecture, **options):
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    return LLM(str(oracle_of(architecture)[1]), **exact | options)


def hf_pixels(architecture, images):
    module, _, name = PROCESSORS[architecture].partition(":")
    kind = getattr(import_module(f"transformers.models.{module}"), name)
    return kind.from_pretrained(oracle_of(architecture)[1])(images, return_tensors="pt")


def pictures(images):
    return [{"prompt": "", "multi_modal_data": {"image": image}} for image in images]


def vectors(llm, prompts):
    return torch.tensor([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)])


@torch.inference_mode()
def text_features(architecture, text):
    ids = [101, *map(int, text.split()), 102]
    ids += [1] * (24 - len(ids)) if architecture == SIGLIP else []
    found = oracle_of(architecture)[0].get_text_features(input_ids=torch.tensor([ids]))
    return functional.normalize(found.pooler_output, dim=-1)


@torch.inference_mode()
def image_features(architecture, images):
    pixels = hf_pixels(architecture, images)["pixel_values"]
    found = oracle_of(architecture)[0].get_image_features(pixel_values=pixels)
    return functional.normalize(found.pooler_output, dim=-1)


@pytest.mark.parametrize("architecture", [CLIP, SIGLIP])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 32, "max_num_seqs": 2}])
def test_one_space(architecture, options):
    """Texts beside pictures, in one batch and in several."""
    llm, images = make_llm(architecture, **options), make_images(5)
    both = vectors(llm, [*TEXTS, *pictures(images)])
    expected = torch.cat([text_features(architecture, text) for text in TEXTS])
    assert (both[:3] - expected).abs().max() <= TOLERANCE
    assert (both[3:] - image_features(architecture, images)).abs().max() <= TOLERANCE
    assert torch.equal(vectors(llm, pictures(images[::-1])), both[3:].flip(0))


def test_broken_embedders_are_noticed(monkeypatch):
    """Negative twins: another patch than the class token; texts without padding; a text's own state."""
    from octavo.runtime.batch import ForwardBatch
    from octavo.runtime.models.contrastive import CLIPEncoder

    encode = encode_prompt
    images = make_images(2)
    expected = image_features(CLIP, images)
    pool = CLIPEncoder.pool
    with monkeypatch.context() as patch:
        patch.setattr(CLIPEncoder, "pool", lambda encoder, hidden: pool(encoder, hidden[:, 1:]))
        assert (vectors(make_llm(CLIP), pictures(images)) - expected).abs().max() > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(ForwardBatch, "with_given_embeds", lambda batch, embeddings: embeddings)
        assert (vectors(make_llm(CLIP), pictures(images)) - expected).abs().max() > 1e-2
    with monkeypatch.context() as patch:
        patch.setattr(
            "octavo.frontend.requests.pooling_input.encode_prompt", lambda *given: encode(*given[:4])
        )
        found = vectors(make_llm(SIGLIP), TEXTS[:1])
    assert (found - text_features(SIGLIP, TEXTS[0])).abs().max() > 1e-2


def test_a_text_or_a_picture():
    [image] = make_images(1)
    llm = make_llm(CLIP)
    with pytest.raises(RequestError, match="embeds a text or an image, not both"):
        llm.embed({"prompt": "5", "multi_modal_data": {"image": image}}, use_tqdm=False)
    with pytest.raises(RequestError, match="has 1 image placeholder"):
        llm.embed({"prompt": "", "multi_modal_data": {"image": [image, image]}}, use_tqdm=False)


@torch.inference_mode()
def colqwen_vectors(ids, images=()):
    oracle = oracle_of(COLQWEN)[0]
    tokens, given = torch.tensor([ids]), {}
    if images:
        found = hf_pixels(COLQWEN, images)
        types = (tokens == IMAGE).int()
        positions, _ = oracle.vlm.get_rope_index(tokens, types, image_grid_thw=found["image_grid_thw"])
        given = {"pixel_values": found["pixel_values"][None], "image_grid_thw": found["image_grid_thw"]}
        given["position_ids"] = positions
    return oracle(input_ids=tokens, attention_mask=torch.ones_like(tokens), **given).embeddings[0]


@pytest.mark.parametrize("options", [{}, {"long_prefill_token_threshold": 7}])
def test_pages(options):
    """A vector for each token of a page, and of what is asked; both as they were in training."""
    llm, images = make_llm(COLQWEN, **options), make_images(3)
    outputs = llm.encode([*pictures(images), "5 6"], pooling_task="token_embed", use_tqdm=False)
    for image, output in zip(images, outputs, strict=False):
        assert output.prompt_token_ids[1:3] == [0, 105]  # an unknown word, the mark of an image
        expected = colqwen_vectors(output.prompt_token_ids, [image])
        assert (torch.tensor(output.outputs.data) - expected).abs().max() <= TOLERANCE
    query = outputs[-1]
    assert query.prompt_token_ids == [0, 5, 6, *[107] * 10]
    assert (
        torch.tensor(query.outputs.data) - colqwen_vectors(query.prompt_token_ids)
    ).abs().max() <= TOLERANCE
    several = llm.encode(["8", "5 6"], pooling_task="token_embed", use_tqdm=False)  # tokenized together
    assert several[1].prompt_token_ids == query.prompt_token_ids
    assert _COLQWEN_FORMS["text_form"].count("<|endoftext|>") == 10


def test_positions_of_pages_show(monkeypatch):
    """The twin: a rope of one axis."""
    from octavo.runtime.worker.prepare import token_positions

    place = "octavo.runtime.worker.media.MediaPart._patch_positions"
    monkeypatch.setattr(place, lambda part, work: np.repeat(token_positions(work)[1][None], 3, axis=0))
    [image] = make_images(1)
    [output] = make_llm(COLQWEN).encode(pictures([image]), pooling_task="token_embed", use_tqdm=False)
    expected = colqwen_vectors(output.prompt_token_ids, [image])
    assert (torch.tensor(output.outputs.data) - expected).abs().max() > 1e-3
