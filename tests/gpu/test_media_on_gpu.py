"""Pictures and sounds on a GPU, by captured steps, against transformers' classes on the CPU, in float32."""

import pytest
import torch

from tests.integration import test_encoder_graphs as graphs
from tests.integration.test_speech_features import GREEDY, PROMPT
from tests.parity import test_audio_models as audio
from tests.parity import test_image_embedders as embedders
from tests.parity import test_media_models as media
from tests.parity import test_omni as omni
from tests.parity import test_whisper as whisper

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", media.FAMILIES)
def test_images_on_gpu(architecture):
    """Of several pictures; again with prefix hits; decoding is replayed, and eager steps say the same."""
    requests = media.make_requests(architecture)
    with media.make_llm(architecture) as llm:
        first = llm.generate(requests, media.PARAMS, use_tqdm=False)
        assert max(media.differences(architecture, requests, first)) <= media.TOLERANCE
        again = llm.generate(requests[::-1], media.PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again[::-1]] == [o.outputs[0].token_ids for o in first]


@pytest.mark.parametrize("architecture", media.FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_captured_encoders_on_gpu(architecture, dtype, tolerance):
    """New images of sizes that came before: a graph's numbers are those of its launches."""
    requests, found = [graphs.request_of(architecture, seed) for seed in range(4)], []
    types = {"dtype": dtype, "activations": "auto", "kv_cache_dtype": "auto"}
    for options in ({}, {"enforce_eager": True}):
        with media.make_llm(architecture, **types, **options) as llm:
            outputs = [llm.generate(one, media.PARAMS, use_tqdm=False)[0] for one in requests]
        rows = [output.outputs[0].logprobs[0] for output in outputs]
        found.append(torch.tensor([[row[i].logprob for i in range(len(row))] for row in rows]))
    assert (found[0] - found[1]).abs().max() <= tolerance
    assert (found[0][2] - found[0][3]).abs().max() > 2 * tolerance, "images do not show"


def test_adapters_of_encoders_on_gpu(tmp_path):
    """Beside captured batches of the base's images."""
    graphs.test_batches_with_adapters_are_no_replays(None, tmp_path)


@pytest.mark.parametrize("architecture", audio.FAMILIES)
def test_sounds_on_gpu(architecture):
    requests = audio.make_requests(architecture)
    with audio.make_llm(architecture) as llm:
        outputs = llm.generate(requests, audio.PARAMS, use_tqdm=False)
    assert audio.difference(architecture, requests, outputs) <= audio.TOLERANCE


def test_omni_on_gpu():
    requests = [omni.make_request(seed) for seed in range(3)]
    with omni.make_llm() as llm:
        outputs = llm.generate(requests, omni.PARAMS, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        assert omni.difference(output, request["multi_modal_data"]) <= omni.TOLERANCE


@pytest.mark.parametrize("architecture", [embedders.CLIP, embedders.SIGLIP])
def test_embedders_on_gpu(architecture):
    images = embedders.make_images(3)
    with embedders.make_llm(architecture) as llm:
        both = embedders.vectors(llm, [*embedders.TEXTS, *embedders.pictures(images)])
    texts = torch.cat([embedders.text_features(architecture, text) for text in embedders.TEXTS])
    assert (both[:3] - texts).abs().max() <= 1e-4
    assert (both[3:] - embedders.image_features(architecture, images)).abs().max() <= 1e-4


def test_captured_speech_on_gpu():
    """The tokens of eager steps, which are the oracle's."""
    requests = [whisper.request_of(seed, prompt=PROMPT) for seed in range(4)]
    made = []
    for options in ({}, {"enforce_eager": True}):
        with whisper.make_llm(**options) as llm:
            outputs = llm.generate(requests, GREEDY, use_tqdm=False)
        made.append([list(output.outputs[0].token_ids) for output in outputs])
    assert made[0] == made[1]
