"""Models for images against transformers' classes and processors, through the whole engine, in float32."""

from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.frontend.media.registry import PROCESSORS
from octavo.runtime.models.media import MEDIA_ENCODERS
from tests.tiny_media import TINY_MEDIA, make_images, make_oracle, make_prompt, save

TOLERANCE = 1e-4
NUM_TOKENS = 4
WORDS = list(range(3, 100))
PARAMS = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, logprobs=-1, ignore_eos=True, allowed_token_ids=WORDS
)
FAMILIES = sorted(TINY_MEDIA)


@cache
def oracle_of(architecture):
    oracle = make_oracle(architecture)
    return oracle, save(oracle, architecture, Path(mkdtemp()))


@cache
def hf_processor(architecture):
    module, _, name = TINY_MEDIA[architecture].processor.partition(":")
    return getattr(import_module(module), name).from_pretrained(oracle_of(architecture)[1])


def make_llm(architecture, **options):
    exact = {"max_model_len": 1024, "dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    return LLM(
        str(oracle_of(architecture)[1]),
        logprobs_mode="raw_logits",
        max_logprobs=-1,
        **exact | options,
    )


def make_requests(architecture, counts=(1, 2, 5)):
    marker = TINY_MEDIA[architecture].marker
    return [
        {
            "prompt_token_ids": make_prompt(count, seed, marker),
            "multi_modal_data": {"image": make_images(count, seed)},
        }
        for seed, count in enumerate(counts)
    ]


def oracle_inputs(architecture, images):
    found = hf_processor(architecture)(images, return_tensors="pt")
    return TINY_MEDIA[architecture].inputs(found)


@torch.inference_mode()
def oracle_logits(architecture, ids, images):
    oracle = oracle_of(architecture)[0]
    inputs = oracle_inputs(architecture, images) if images else {}
    return oracle(input_ids=torch.tensor([ids]), **inputs).logits[0].float()


def differences(architecture, requests, outputs):
    """The largest difference of logits of each request, for the prompt's end and the tokens behind it."""
    found = []
    for request, output in zip(requests, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        ids = [*output.prompt_token_ids, *tokens[:-1]]
        expected = oracle_logits(architecture, ids, request["multi_modal_data"]["image"])[-len(tokens) :]
        scores = output.outputs[0].logprobs
        ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in scores])
        found.append((ours - expected[:, : ours.shape[1]]).abs().max().item())
    return found


def test_all_families_are_tried():
    assert sorted(PROCESSORS.names()) == sorted(MEDIA_ENCODERS.names()) == FAMILIES


@pytest.mark.parametrize("architecture", FAMILIES)
def test_pixels(architecture):
    """The same numbers as transformers', to the last bit."""
    llm_processor = PROCESSORS.load(architecture)
    oracle, _ = oracle_of(architecture)
    entry = TINY_MEDIA[architecture]
    processor = llm_processor(oracle.config.to_dict(), entry.settings, lambda text: [1])
    for seed in range(4):
        [image] = make_images(1, seed)
        ours = processor.prepare(image, processor.settings)
        theirs = entry.inputs(hf_processor(architecture)([image], return_tensors="pt"))
        for name, expected in theirs.items():
            if name in ours:
                np.testing.assert_array_equal(
                    ours[name].reshape(expected.shape), expected.numpy(), err_msg=name
                )


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 64, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 1024 // 16 + 2},
        {"mm_encoder_cache_gb": 0.0, "long_prefill_token_threshold": 7},
    ],
    ids=["whole", "chunks_of_7", "small_steps", "few_blocks", "no_encoder_cache"],
)
def test_logits(architecture, options):
    """Of 1, 2 and 5 images of random sizes at random places; then in another order, with prefix hits."""
    if PROCESSORS.load(architecture).sees_itself:
        options = {k: v for k, v in options.items() if k == "num_gpu_blocks_override"}
    llm, requests = make_llm(architecture, **options), make_requests(architecture)
    first = llm.generate(requests, PARAMS, use_tqdm=False)
    assert max(differences(architecture, requests, first)) <= TOLERANCE
    again = llm.generate(requests[::-1], PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again[::-1]] == [o.outputs[0].token_ids for o in first]
    assert max(differences(architecture, requests[::-1], again)) <= TOLERANCE
    if "num_gpu_blocks_override" not in options:
        assert all(output.num_cached_tokens > 0 for output in again)


def spoiled(architecture, requests, **options):
    """The largest difference after something was broken."""
    outputs = make_llm(architecture, **options).generate(requests, PARAMS, use_tqdm=False)
    return max(differences(architecture, requests, outputs))


def test_a_broken_encoder_is_noticed(monkeypatch):
    """Negative twins: the class token kept, another layer taken, patches in another order, places shifted."""
    llava, pixtral = "LlavaForConditionalGeneration", "PixtralForConditionalGeneration"
    requests = make_requests(llava, (1,))
    assert spoiled(llava, requests) <= TOLERANCE

    def shifted(encoder, items):
        return [embeds.roll(1, 0) for embeds in encode(encoder, items)]

    from octavo.runtime.layers.rotary import AxialRotary
    from octavo.runtime.models import llava as module
    from octavo.runtime.models.llava import LlavaEncoder

    encode = LlavaEncoder.encode
    with monkeypatch.context() as patch:
        patch.setattr(LlavaEncoder, "encode", shifted)  # as with the class token in front
        assert spoiled(llava, requests) > 10 * TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr(module, "chosen_layers", lambda config, num_layers: [num_layers])
        patch.setattr(LlavaEncoder, "unused", lambda encoder: (r"post_layernorm",))
        assert spoiled(llava, requests) > 10 * TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr(
            "octavo.messages.media.MediaItem.end", property(lambda item: item.start + item.length - 1)
        )
        assert spoiled(llava, requests) > 10 * TOLERANCE  # a placeholder too few
    requests = make_requests(pixtral, (1,))
    angles = AxialRotary._angles
    with monkeypatch.context() as patch:
        patch.setattr(AxialRotary, "_angles", lambda rope, rows, columns: 0 * angles(rope, rows, columns))
        assert spoiled(pixtral, requests) > 10 * TOLERANCE


def test_broken_pixels_are_noticed(monkeypatch):
    """A negative twin: another filter than the model was trained with."""
    from octavo.frontend.media import pixels

    architecture = "LlavaForConditionalGeneration"
    resized = pixels.resized
    monkeypatch.setattr(pixels, "resized", lambda image, height, width, _: resized(image, height, width, 0))
    requests = make_requests(architecture, (1,))
    assert spoiled(architecture, requests) > 10 * TOLERANCE


@pytest.mark.parametrize("architecture", FAMILIES)
def test_preempted_requests(architecture):
    """Requests that lose their blocks compute their images' tokens anew."""
    llm = make_llm(architecture, num_gpu_blocks_override=16, max_model_len=224, enable_prefix_caching=False)
    requests = make_requests(architecture, (1,) * 6)
    params = PARAMS.clone()
    params.max_tokens = 60
    outputs = llm.generate(requests, params, use_tqdm=False)
    assert max(differences(architecture, requests, outputs)) <= TOLERANCE
    preemptions = next(m for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preemptions.value > 0
