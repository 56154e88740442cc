"""Qwen2.5-Omni's thinker against transformers' class, through the whole engine, in float32."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from transformers import AutoConfig, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from octavo import LLM, SamplingParams
from octavo.base.errors import RequestError
from octavo.runtime.models.qwen_omni import OmniEncoder
from octavo.runtime.worker.media import read_features
from tests.tiny_media import IMAGE, TINY_MEDIA, VIDEO, make_images, numbers_of, save_tokenizer
from tests.tiny_speech import RATE, SETTINGS, make_audio, spread

SOUND, TOLERANCE = 116, 1e-4
PARAMS = SamplingParams(
    temperature=0, max_tokens=4, logprobs=-1, ignore_eos=True, allowed_token_ids=list(range(3, 100))
)
_VL = TINY_MEDIA["Qwen2_5_VLForConditionalGeneration"]
CONFIG = {
    "text_config": _VL.config["text_config"] | {"model_type": "qwen2_5_omni_text"},
    "vision_config": _VL.config["vision_config"] | {"model_type": "qwen2_5_omni_vision_encoder"},
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "num_mel_bins": 20,
        "n_window": 10,
        "output_dim": 48,
    },
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "audio_token_index": SOUND,
    "vision_start_token_id": 124,
    "vision_end_token_id": 125,
    "audio_start_token_id": 126,
    "audio_end_token_id": 127,
}


@cache
def oracle_of():
    full = AutoConfig.for_model("qwen2_5_omni_thinker", **CONFIG)
    full.vision_start_token_id = 124
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        oracle = Qwen2_5OmniThinkerForConditionalGeneration._from_config(full, attn_implementation="eager")
    spread(oracle.eval(), 0)
    folder = Path(mkdtemp())
    oracle.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(_VL.settings | SETTINGS | {"chunk_length": 300})
    )
    save_tokenizer(folder)
    return oracle, folder


def make_llm(**options):
    exact = {"max_model_len": 1024, "dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    folder = str(oracle_of()[1])
    return LLM(folder, logprobs_mode="raw_logits", max_logprobs=-1, **exact | options)


def make_request(seed):
    """A prompt of text, pictures and sounds in changing order."""
    rng = np.random.default_rng(seed)
    images, kinds = [], rng.permutation(["image"] * (seed + 1) + ["audio"] * (3 - seed))
    sounds = [make_audio(seed + i, float(rng.uniform(0.1, 1.5))) for i in range(3 - seed)]
    images, ids = make_images(seed + 1, seed), [5, 6]
    for kind in kinds:
        ids += [124, IMAGE, 125] if kind == "image" else [126, SOUND, 127]
        ids += rng.integers(3, 100, 3).tolist()
    data = {"image": images, "audio": [(sound, RATE) for sound in sounds]}
    return {"prompt_token_ids": ids, "multi_modal_data": data}


@torch.inference_mode()
def oracle_logits(ids, data, **more):
    oracle, tokens = oracle_of()[0], torch.tensor([ids])
    given = dict(more)
    if images := data.get("image"):
        found = Qwen2VLImageProcessorPil.from_pretrained(oracle_of()[1])(images, return_tensors="pt")
        given |= {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}
    if sounds := data.get("audio"):
        extractor = WhisperFeatureExtractor(**SETTINGS)
        heard = extractor(
            [sound for sound, _ in sounds],
            sampling_rate=RATE,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = heard.attention_mask
        given |= {"input_features": heard.input_features, "feature_attention_mask": mask}
    mask = torch.ones_like(tokens)
    return oracle(input_ids=tokens, attention_mask=mask, **given).logits[0].float()


def difference(output, data, **more):
    tokens = output.outputs[0].token_ids
    expected = oracle_logits([*output.prompt_token_ids, *tokens[:-1]], data, **more)[-len(tokens) :]
    ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in output.outputs[0].logprobs])
    return (ours - expected[:, : ours.shape[1]]).abs().max().item()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["whole", "chunks_of_7", "two_ranks"],
)
def test_logits(options):
    """Of pictures and sounds in one prompt; then in another order of requests, with prefix hits."""
    llm, requests = make_llm(**options), [make_request(seed) for seed in range(3)]
    outputs = llm.generate(requests, PARAMS, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        assert difference(output, request["multi_modal_data"]) <= TOLERANCE
    again = llm.generate(requests[::-1], PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again[::-1]] == [o.outputs[0].token_ids for o in outputs]
    assert all(output.num_cached_tokens > 0 for output in again)


def test_videos():
    """Their time is counted by 25 for each second."""
    frames = [each.resize((42, 56)) for each in make_images(5, seed=3)]
    video = (frames, {"fps": 1.25, "total_num_frames": 5, "frames_indices": list(range(5))})
    request = {"prompt_token_ids": [5, 124, VIDEO, 125, 7, 8], "multi_modal_data": {"video": [video]}}
    sizes = {"size": {"shortest_edge": 28 * 28, "longest_edge": 8 * 70 * 70}}
    llm = make_llm(mm_processor_kwargs=sizes)
    [output] = llm.generate(request, PARAMS, use_tqdm=False)
    [item] = llm.llm_engine.input_processor.process(request).engine_requests[0].spec.media
    found = {name: torch.tensor(read_features(part)) for name, part in item.features.items()}
    more = {
        "pixel_values_videos": torch.tensor(numbers_of(found)),
        "video_grid_thw": found["grid_thw"][None],
        "video_second_per_grid": found["seconds"].float(),
    }
    assert difference(output, {}, **more) <= TOLERANCE


def test_broken_hearing_is_noticed(monkeypatch):
    """Negative twins: one stretch instead of several; no silence behind a sound; sounds count by rows."""
    request = {
        "prompt_token_ids": [5, 126, SOUND, 127, 9, 124, IMAGE, 125, 7],
        "multi_modal_data": {"audio": [(make_audio(1, 1.03), RATE)], "image": make_images(1)},
    }

    def spoiled(name, broken):
        with monkeypatch.context() as patch:
            patch.setattr(OmniEncoder, name, broken)
            [output] = make_llm().generate(request, PARAMS, use_tqdm=False)
        return difference(output, request["multi_modal_data"])

    hear, places = OmniEncoder._hear, OmniEncoder.patch_positions
    assert spoiled("_hear", hear) <= TOLERANCE

    def whole(encoder, mels):
        encoder._frames = 500
        return hear(encoder, mels)

    def by_rows(encoder, features):
        found = places(encoder, features)
        return found if "grid_thw" in features else [found[0] * np.array([[0], [1], [1]])]

    assert spoiled("_hear", whole) > 10 * TOLERANCE
    assert spoiled("patch_positions", by_rows) > 10 * TOLERANCE


def test_too_short_a_sound():
    request = {"prompt_token_ids": [5, 126, SOUND], "multi_modal_data": {"audio": np.zeros(20, np.float32)}}
    with pytest.raises(RequestError, match="The audio is too short"):
        make_llm().generate(request, PARAMS, use_tqdm=False)


def test_the_whole_checkpoint(tmp_path):
    """A file with what speaks beside the thinker, under other names."""
    from safetensors.torch import load_file, save_file

    folder = oracle_of()[1]
    tensors = {
        f"thinker.{name.replace('model.language_model.', 'model.')}": value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    tensors = {
        name.replace("thinker.model.visual.", "thinker.visual.").replace(
            "thinker.model.audio_tower.", "thinker.audio_tower."
        ): value
        for name, value in tensors.items()
    }
    save_file(tensors | {"talker.x.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    thinker = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    request = make_request(1)
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32", "max_model_len": 512}
    llm = LLM(str(tmp_path), logprobs_mode="raw_logits", max_logprobs=-1, **exact)
    [output] = llm.generate(request, PARAMS, use_tqdm=False)
    assert difference(output, request["multi_modal_data"]) <= TOLERANCE
