"""Models for images against transformers' classes and processors, through the whole engine, in float32."""

from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.frontend.media.registry import AUDIO_PROCESSORS, PROCESSORS
from octavo.lora.request import LoRARequest
from octavo.runtime.models.media import MEDIA_ENCODERS
from octavo.runtime.models.qwen_vl import by_windows as BY_WINDOWS
from octavo.runtime.worker.media import read_features
from octavo.runtime.worker.prepare import token_positions
from tests import handmade_adapters
from tests.tiny_image_embedders import CONFIGS as EMBEDDERS
from tests.tiny_media import IMAGE, TINY_MEDIA, VIDEO, make_images, make_oracle, make_prompt, numbers_of, save

pytestmark = pytest.mark.matrix(6)

PART, STATE = "octavo.runtime.worker.media.MediaPart", "octavo.runtime.worker.request_state.RequestState"
QWEN = "octavo.runtime.models.qwen_vl"
TOLERANCE = 1e-4
NUM_TOKENS = 4
WORDS = list(range(3, 100))
PARAMS = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, logprobs=-1, ignore_eos=True, allowed_token_ids=WORDS
)
FAMILIES = sorted(TINY_MEDIA)
GEMMA = "Gemma3ForConditionalGeneration"
OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"
PHI = "Phi4MultimodalForCausalLM"
"""Have tests of their own, as the models that embed have."""
CHUNKS = {"long_prefill_token_threshold": 7}


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
    tiny = TINY_MEDIA[architecture]
    return [
        {
            "prompt_token_ids": make_prompt(count, seed, tiny.marker, around=tiny.around),
            "multi_modal_data": {"image": make_images(count, seed)},
        }
        for seed, count in enumerate(counts)
    ]


def oracle_inputs(architecture, images):
    found = hf_processor(architecture)(images, return_tensors="pt")
    return TINY_MEDIA[architecture].inputs(found)


@torch.inference_mode()
def oracle_logits(architecture, ids, images, oracle):
    oracle = oracle or oracle_of(architecture)[0]
    inputs = oracle_inputs(architecture, images) if images else {}
    if (tiny := TINY_MEDIA[architecture]).types and images:
        inputs[tiny.types] = (torch.tensor([ids]) == oracle_of(architecture)[0].config.image_token_id).int()
    return oracle(input_ids=torch.tensor([ids]), **inputs).logits[0].float()


def differences(architecture, requests, outputs, oracle=None):
    """The largest difference of logits of each request, for the prompt's end and the tokens behind it."""
    found = []
    for request, output in zip(requests, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        ids = [*output.prompt_token_ids, *tokens[:-1]]
        expected = oracle_logits(architecture, ids, request["multi_modal_data"]["image"], oracle)
        expected = expected[-len(tokens) :]
        scores = output.outputs[0].logprobs
        ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in scores])
        found.append((ours - expected[:, : ours.shape[1]]).abs().max().item())
    return found


def test_all_families_are_tried():
    of_images = set(MEDIA_ENCODERS.names()) - (set(AUDIO_PROCESSORS.names()) - {OMNI, PHI})
    assert sorted(PROCESSORS.names()) == sorted(of_images) == sorted([*FAMILIES, *EMBEDDERS, OMNI, PHI])


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
        given = ours | {"pixel_values": numbers_of(ours)}
        theirs = entry.inputs(hf_processor(architecture)([image], return_tensors="pt"))
        for name, expected in theirs.items():
            if name in ours:
                np.testing.assert_array_equal(
                    given[name].reshape(expected.shape), expected.numpy(), err_msg=name
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
    from octavo.runtime.models.llava import LlavaEncoder

    encode = LlavaEncoder.encode
    with monkeypatch.context() as patch:
        patch.setattr(LlavaEncoder, "encode", shifted)  # as with the class token in front
        assert spoiled(llava, requests) > 10 * TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr("octavo.runtime.models.vision.chosen_layers", lambda config, num_layers: [num_layers])
        patch.setattr(LlavaEncoder, "unused", lambda encoder: (r"post_layernorm",))
        assert spoiled(llava, requests) > 10 * TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr(
            "octavo.messages.media.MediaItem.end", property(lambda item: item.start + item.length - 1)
        )
        assert spoiled(llava, requests) > 10 * TOLERANCE  # a placeholder too few
    requests = make_requests(pixtral, (1,))
    enter = AxialRotary.enter
    with monkeypatch.context() as patch:
        patch.setattr(AxialRotary, "enter", lambda rope, batch, places: enter(rope, batch, 0 * places))
        assert spoiled(pixtral, requests) > 10 * TOLERANCE


def _one_axis(part, work):
    return np.repeat(token_positions(work)[1][None], 3, axis=0)


@pytest.mark.parametrize(
    ("architecture", "place", "broken"),
    [
        ("Qwen2VLForConditionalGeneration", f"{PART}._patch_positions", _one_axis),
        ("Qwen3VLForConditionalGeneration", f"{PART}._patch_positions", _one_axis),
        ("Qwen2VLForConditionalGeneration", f"{STATE}.rope_positions", lambda state, rows, places: places),
        ("Qwen3VLForConditionalGeneration", "octavo.runtime.batch.GivenEmbeds.add_part", lambda *all: all[2]),
        (
            "Qwen2_5_VLForConditionalGeneration",
            f"{QWEN}.by_windows",
            lambda grids, side: BY_WINDOWS(grids, 99),
        ),
        ("Gemma3ForConditionalGeneration", f"{PART}._mutual", lambda part, work: None),
    ],
    ids=["one_axis", "one_axis_of_3", "no_offset", "no_deepstack", "one_window", "causal_inside"],
)
def test_broken_text_positions_and_masks_are_noticed(monkeypatch, architecture, place, broken):
    """Negative twins: a rope of one axis, decoding behind images, layers that get nothing, causal images."""
    requests = make_requests(architecture, (2,))
    assert spoiled(architecture, requests) <= TOLERANCE
    monkeypatch.setattr(place, broken)
    assert spoiled(architecture, requests) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "architecture", ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_quantized_text_models(architecture):
    """Weights of the text model are rounded, those of the encoder are not."""
    requests, seen = make_requests(architecture, (1, 2)), []
    for options in ({"quantization": "int8"}, {}):
        with make_llm(architecture, **options) as llm:
            outputs = llm.generate(requests, PARAMS, use_tqdm=False)
            cache = llm.llm_engine.core.client._core._executor._worker._media.cache
            seen.append(torch.cat([output for output, _ in cache._entries.values()]))
        assert (
            TOLERANCE * bool(options)
            < max(differences(architecture, requests, outputs))
            <= (5e-2 if options else TOLERANCE)
        )
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    "options",
    [{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {"enforce_eager": True}],
    ids=["ngram", "eager"],
)
def test_positions_behind_images_in_all_kinds_of_steps(options):
    """Recorded steps, drafts that are verified, and several sequences of a prompt agree."""
    architecture = "Qwen3VLForConditionalGeneration"
    requests, params = (
        make_requests(architecture),
        SamplingParams(
            temperature=0.8, seed=3, n=2, max_tokens=24, ignore_eos=True, allowed_token_ids=WORDS[:4]
        ),
    )
    texts = [
        [
            [one.token_ids for one in output.outputs]
            for output in llm.generate(requests, params, use_tqdm=False)
        ]
        for llm in (make_llm(architecture), make_llm(architecture, **options))
    ]
    assert texts[0] == texts[1]


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


VIDEO_FAMILIES = [name for name in FAMILIES if name.startswith("Qwen")]


@pytest.mark.parametrize("architecture", VIDEO_FAMILIES)
def test_videos(architecture):
    """Beside an image, whole and in chunks: frames are patched as images are; the logits are the oracle's."""
    image, frames = make_images(1)[0], [each.resize((42, 56)) for each in make_images(5, seed=3)]
    ids = [5, 124, VIDEO, 125, 6, 124, IMAGE, 125, 7]
    request = {"prompt_token_ids": ids, "multi_modal_data": {"image": image, "video": frames}}
    sizes = {"size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 70 * 70}}
    llms = [make_llm(architecture, mm_processor_kwargs=sizes, **chunks) for chunks in ({}, CHUNKS)]
    outputs = [llm.generate(request, PARAMS, use_tqdm=False)[0] for llm in llms]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    video, still = media_of(llms[0], request)
    patches, grid = numbers_of(video), video["grid_thw"]
    assert grid.tolist()[0] == 3 and len(patches) == grid.prod()
    found = hf_processor(architecture)(frames, size=sizes["size"], return_tensors="np")
    halves = patches.reshape(3, -1, 3, 2, 49)
    pairs = found["pixel_values"].reshape(5, -1, 3, 2, 49)[:, :, :, 0]
    np.testing.assert_array_equal(halves[:, :, :, 0], pairs[[0, 2, 4]])
    np.testing.assert_array_equal(halves[:, :, :, 1], pairs[[1, 3, 4]])
    oracle = oracle_of(architecture)[0]
    for output in outputs:
        tokens = output.outputs[0].token_ids
        all_ids = torch.tensor([[*output.prompt_token_ids, *tokens[:-1]]])
        inputs = {
            "pixel_values": torch.tensor(numbers_of(still)),
            "image_grid_thw": torch.tensor(still["grid_thw"])[None],
            "pixel_values_videos": torch.tensor(patches),
            "video_grid_thw": torch.tensor(grid)[None],
            "mm_token_type_ids": (all_ids == IMAGE).int() + 2 * (all_ids == VIDEO).int(),
        }
        if "seconds" in video and "2_5" in architecture:
            inputs["second_per_grid_ts"] = torch.tensor(video["seconds"])
        with torch.inference_mode():
            expected = oracle(input_ids=all_ids, **inputs).logits[0, -len(tokens) :]
        scores = output.outputs[0].logprobs
        ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in scores])
        assert (ours - expected[:, : ours.shape[1]]).abs().max() <= TOLERANCE


def media_of(llm, request):
    """The arrays of a request's video and image."""
    processor = llm.llm_engine.input_processor
    [item] = processor.process(request).engine_requests
    return [{name: read_features(f) for name, f in one.features.items()} for one in item.spec.media]


def test_text_goes_on_behind_the_last_second():
    """Of a video of 2.5: its squares' times are seconds times four, and no later text has one of them."""
    from octavo.runtime.models.qwen_vl import Qwen25VLEncoder

    encoder = object.__new__(Qwen25VLEncoder)
    vars(encoder).update(vision={"tokens_per_second": 4}, _merge=2)
    [positions] = encoder.patch_positions({"grid_thw": np.array([3, 4, 2]), "seconds": np.array([1.3])})
    assert positions.tolist() == [[0, 0, 5, 5, 10, 10], [0, 1] * 3, [0] * 6]


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["weights", "data"])
@pytest.mark.parametrize(
    "architecture", ["Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"]
)
def test_two_ranks(architecture, mode):
    """Each with a part of the encoder's weights, or with all of them and a part of the images."""
    requests = make_requests(architecture)
    llm = make_llm(architecture, tensor_parallel_size=2, mm_encoder_tp_mode=mode)
    outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    assert max(differences(architecture, requests, outputs)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration"])
def test_two_stages(architecture):
    """The second has positions of its own, the first what stands beside the embeddings."""
    requests = make_requests(architecture)
    options = {"pipeline_parallel_size": 2, "long_prefill_token_threshold": 7}
    outputs = make_llm(architecture, **options).generate(requests, PARAMS, use_tqdm=False)
    assert max(differences(architecture, requests, outputs)) <= TOLERANCE


def test_adapters_beside_images(tmp_path):
    """Of the text model, in some requests of a batch."""
    architecture = "Qwen3VLForConditionalGeneration"
    oracle, requests = oracle_of(architecture)[0], make_requests(architecture)
    merged = handmade_adapters.write(oracle, tmp_path / "adapter", 4, 0)
    one = LoRARequest("a", 1, str(tmp_path / "adapter"))
    llm = make_llm(architecture, enable_lora=True)
    outputs = llm.generate(requests, PARAMS, lora_request=[one, None, one], use_tqdm=False)
    with_adapter = differences(architecture, requests, outputs, merged)
    plain = differences(architecture, requests, outputs)
    assert max(with_adapter[0], plain[1], with_adapter[2]) <= TOLERANCE
    assert min(plain[0], with_adapter[1], plain[2]) > 10 * TOLERANCE


def test_videos_of_frames_at_half_their_size():
    """Of OneVision, beside an image."""
    architecture = "LlavaOnevisionForConditionalGeneration"
    image, frames = make_images(1)[0], [each.resize((50, 40)) for each in make_images(3, seed=3)]
    request = {
        "prompt_token_ids": [5, 125, 6, IMAGE, 7],
        "multi_modal_data": {"image": image, "video": frames},
    }
    [output] = make_llm(architecture).generate(request, PARAMS, use_tqdm=False)
    whole = hf_processor(architecture)(frames, return_tensors="pt")["pixel_values"][:, 0]
    ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]])
    inputs = oracle_inputs(architecture, [image]) | {"pixel_values_videos": whole[None]}
    with torch.inference_mode():
        expected = oracle_of(architecture)[0](input_ids=ids, **inputs).logits[0, -NUM_TOKENS:]
    scores = output.outputs[0].logprobs
    ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in scores])
    assert (ours - expected[:, : ours.shape[1]]).abs().max() <= TOLERANCE
    assert PROCESSORS.load(architecture).VIDEO_DEFAULTS


@pytest.mark.parametrize(
    "architecture", ["InternVLForConditionalGeneration", "SmolVLMForConditionalGeneration"]
)
def test_videos_as_rows_of_images(architecture):
    """Each frame stands behind its number or its time, and is seen as an image that is not cut."""
    image, frames = make_images(1)[0], [each.resize((50, 40)) for each in make_images(3, seed=3)]
    told = {"fps": 2.0, "total_num_frames": 130, "frames_indices": [0, 60, 129]}
    request = {
        "prompt_token_ids": [5, VIDEO, 6, IMAGE, 7],
        "multi_modal_data": {"image": image, "video": [(frames, told)]},
    }
    llm = make_llm(architecture)
    [output] = llm.generate(request, PARAMS, use_tqdm=False)
    video, still = media_of(llm, request)
    ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]])
    both = torch.tensor(np.concatenate([numbers_of(video), numbers_of(still)]))
    with torch.inference_mode():
        given = both[None] if "SmolVLM" in architecture else both
        expected = oracle_of(architecture)[0](input_ids=ids, pixel_values=given).logits[0, -NUM_TOKENS:]
    scores = output.outputs[0].logprobs
    ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in scores])
    assert (ours - expected[:, : ours.shape[1]]).abs().max() <= TOLERANCE
    processor = llm.llm_engine.input_processor.media.reader.processor
    whole = hf_processor(architecture)(frames, return_tensors="np", **UNCUT[architecture])
    pixels = whole["pixel_values"].reshape(3, 3, 28, 28)
    np.testing.assert_array_equal(numbers_of(video), pixels)
    processor.encode = lambda text: [text]
    said = "".join(str(part) for part in processor.video_tokens(video)).replace(f"{IMAGE}", "")
    assert said.replace("<image>", "") == FILMS[architecture]


UNCUT = {
    "InternVLForConditionalGeneration": {"crop_to_patches": False},
    "SmolVLMForConditionalGeneration": {"do_image_splitting": False},
}
_FRAME = "<fake_token_around_image><global-img><fake_token_around_image>"
FILMS = {
    "InternVLForConditionalGeneration": "Frame1: <img></img>\nFrame2: <img></img>\nFrame3: <img></img>",
    "SmolVLMForConditionalGeneration": "You are provided the following series of three frames from a 0:01:05 "
    f"[H:MM:SS] video.\n\nFrame from 00:00:{_FRAME}\nFrame from 00:30:{_FRAME}\n"
    f"Frame from 01:04:{_FRAME}\n\n",
}


def test_numbers_in_words():
    """As num2words writes them."""
    from octavo.frontend.media.processors.idefics3 import _words

    assert [_words(n) for n in (0, 7, 19, 32, 40, 100, 101, 768, 1000, 1024)] == [
        *("zero", "seven", "nineteen", "thirty-two", "forty", "one hundred", "one hundred and one"),
        *("seven hundred and sixty-eight", "one thousand", "one thousand and twenty-four"),
    ]
