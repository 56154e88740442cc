"""Text models that hear, against transformers' classes, through the whole engine, in float32."""

import re
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperFeatureExtractor

from octavo import LLM, SamplingParams
from octavo.base.errors import RequestError
from octavo.frontend.media.registry import AUDIO_PROCESSORS
from octavo.runtime.models.media import MEDIA_ENCODERS
from tests.tiny_audio import CONFIGS, oracle_of
from tests.tiny_media import IMAGE, make_prompt
from tests.tiny_speech import RATE, SECONDS, SETTINGS, make_audio

TOLERANCE = 1e-4
PARAMS = SamplingParams(
    temperature=0, max_tokens=4, logprobs=-1, ignore_eos=True, allowed_token_ids=list(range(3, 100))
)
FAMILIES = sorted(CONFIGS)
OWN = {"Qwen2_5OmniThinkerForConditionalGeneration", "Phi4MultimodalForCausalLM"}
"""Have tests of their own."""


def make_llm(architecture, folder=None, **options):
    exact = {"max_model_len": 1024, "dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    folder = str(folder or oracle_of(architecture)[1])
    return LLM(folder, logprobs_mode="raw_logits", max_logprobs=-1, **exact | options)


def sounds(architecture, count, seed):
    longest = 4.5 if architecture.startswith("Voxtral") else SECONDS
    lengths = np.random.default_rng(seed).uniform(0.3, longest, count)
    return [make_audio(seed + i, float(length)) for i, length in enumerate(lengths)]


def make_requests(architecture, counts=(1, 2, 5)):
    return [
        {
            "prompt_token_ids": make_prompt(count, seed, IMAGE),
            "multi_modal_data": {"audio": [(s, RATE) for s in sounds(architecture, count, seed)]},
        }
        for seed, count in enumerate(counts)
    ]


@torch.inference_mode()
def oracle_logits(architecture, ids, audio):
    oracle, extractor = oracle_of(architecture)[0], WhisperFeatureExtractor(**SETTINGS)
    if architecture.startswith("Voxtral"):
        frames = SECONDS * 100
        whole = [
            extractor(
                s, sampling_rate=RATE, truncation=False, padding=True, pad_to_multiple_of=SECONDS * RATE
            )
            for s in audio
        ]
        parts = [torch.tensor(w.input_features[0]).reshape(20, -1, frames).transpose(0, 1) for w in whole]
        given = {"input_features": torch.cat(parts)}
    else:
        found = extractor(audio, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
        given = {"input_features": found.input_features, "feature_attention_mask": found.attention_mask}
    tokens = torch.tensor([ids])
    return oracle(input_ids=tokens, attention_mask=torch.ones_like(tokens), **given).logits[0].float()


def difference(architecture, requests, outputs):
    worst = 0.0
    for request, output in zip(requests, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        audio = [sound for sound, _ in request["multi_modal_data"]["audio"]]
        ids = [*output.prompt_token_ids, *tokens[:-1]]
        expected = oracle_logits(architecture, ids, audio)[-len(tokens) :]
        ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in output.outputs[0].logprobs])
        worst = max(worst, (ours - expected[:, : ours.shape[1]]).abs().max().item())
    return worst


def test_all_families_are_tried():
    of_text = set(FAMILIES)
    assert set(AUDIO_PROCESSORS.names()) == of_text | OWN | {"WhisperForConditionalGeneration"}
    assert of_text <= set(MEDIA_ENCODERS.names())


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7},
        {"mm_encoder_cache_gb": 0.0, "long_prefill_token_threshold": 32},
    ],
    ids=["whole", "chunks_of_7", "no_encoder_cache"],
)
def test_logits(architecture, options):
    """Of 1, 2 and 5 sounds of random lengths at random places; then in another order, with prefix hits."""
    llm, requests = make_llm(architecture, **options), make_requests(architecture)
    first = llm.generate(requests, PARAMS, use_tqdm=False)
    assert difference(architecture, requests, first) <= TOLERANCE
    again = llm.generate(requests[::-1], PARAMS, use_tqdm=False)
    assert difference(architecture, requests[::-1], again) <= TOLERANCE
    assert all(output.num_cached_tokens > 0 for output in again)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_spellings(architecture, tmp_path):
    """The names of transformers 4 and of 5.17, whose save_pretrained nests the text model once more."""
    folder, request = oracle_of(architecture)[1], make_requests(architecture, (1,))
    copytree(folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for inner, outer in (("model.", "model."), ("model.model.", ""), ("model.model.", "model.")):
        renamed = {
            re.sub(r"^(model\.)?language_model\.(model\.)?", f"language_model.{inner}", name): value
            for name, value in tensors.items()
        }
        renamed = {name.replace("lm_head", f"{outer}lm_head"): value for name, value in renamed.items()}
        assert f"language_model.{inner}embed_tokens.weight" in renamed
        save_file(renamed, tmp_path / "model" / "model.safetensors")
        llm = make_llm(architecture, folder=tmp_path / "model")
        assert difference(architecture, request, llm.generate(request, PARAMS, use_tqdm=False)) <= TOLERANCE


def test_broken_sounds_are_noticed(monkeypatch):
    """Negative twins: positions that are silence are heard, too; neighbours are averaged one too late."""
    from octavo.runtime.models.audio_tower import AudioTower

    architecture, hear = "Qwen2AudioForConditionalGeneration", AudioTower.hear
    requests = make_requests(architecture, (1,))

    def spoiled(broken):
        with monkeypatch.context() as patch:
            patch.setattr(AudioTower, "hear", broken)
            outputs = make_llm(architecture).generate(requests, PARAMS, use_tqdm=False)
        return difference(architecture, requests, outputs)

    def deaf(tower, mels, lengths, pooled):
        whole = hear(tower, mels, None, pooled)
        return [part[: n // 2] for part, n in zip(whole, lengths, strict=True)]

    assert spoiled(hear) <= TOLERANCE
    assert spoiled(deaf) > 10 * TOLERANCE
    assert spoiled(lambda tower, *given, **more: [x.roll(1, 0) for x in hear(tower, *given, **more)]) > 1e-3


def test_too_long_a_sound():
    request = {"prompt_token_ids": [5, IMAGE], "multi_modal_data": {"audio": make_audio(0, 2.5)}}
    with pytest.raises(RequestError, match=r"lasts 2\.5 s; the model hears 2 s at a time"):
        make_llm("Qwen2AudioForConditionalGeneration").generate(request, PARAMS, use_tqdm=False)
