"""Whisper against transformers' class, through the whole engine, in float32."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from octavo import LLM, SamplingParams
from octavo.base.errors import RequestError
from octavo.frontend.media import spectrogram
from octavo.frontend.media.spectrogram import log_mel, mel_filters
from octavo.frontend.speech.words import time_tokens
from tests.tiny_speech import (
    FIRST_TIME,
    IDS,
    NO_TIMES,
    RATE,
    START,
    VOCAB,
    features,
    make_audio,
    make_oracle,
    save,
)

TOLERANCE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=-1, ignore_eos=True)
PROMPT = [START, IDS["<|en|>"], IDS["<|transcribe|>"], NO_TIMES]


@cache
def oracle_of():
    oracle = make_oracle()
    return oracle, save(oracle, Path(mkdtemp()))


def make_llm(**options):
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    return LLM(str(oracle_of()[1]), logprobs_mode="raw_logits", max_logprobs=-1, **exact | options)


def request_of(seed, seconds=1.5, prompt=PROMPT):
    audio = make_audio(seed, seconds)
    return {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (audio, RATE)}}


def make_requests(count=5):
    """Of several lengths, with prompts of several lengths."""
    more = [IDS["<|startofprev|>"], *range(40, 60), *PROMPT]
    return [request_of(i, 0.4 + 0.3 * i, more if i % 2 else PROMPT) for i in range(count)]


@torch.inference_mode()
def oracle_logits(ids, audio):
    oracle = oracle_of()[0]
    return oracle(input_features=features([audio]), decoder_input_ids=torch.tensor([ids])).logits[0].float()


def difference(requests, outputs):
    """The largest difference of logits, for the prompt's end and the tokens behind it."""
    worst = 0.0
    for request, output in zip(requests, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        audio = request["multi_modal_data"]["audio"][0]
        expected = oracle_logits([*output.prompt_token_ids, *tokens[:-1]], audio)[-len(tokens) :]
        ours = torch.tensor([[row[i].logprob for i in range(VOCAB)] for row in output.outputs[0].logprobs])
        worst = max(worst, (ours - expected).abs().max().item())
    return worst


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7},
        {"max_num_batched_tokens": 128, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 16},
        {"mm_encoder_cache_gb": 0.0, "enable_prefix_caching": False},
        {"block_size": 32},
    ],
    ids=["whole", "chunks_of_7", "small_steps", "few_blocks", "no_caches", "large_blocks"],
)
def test_logits(options):
    """Of several requests at once; then in another order, with prefix hits."""
    llm, requests = make_llm(**options), make_requests()
    first = llm.generate(requests, PARAMS, use_tqdm=False)
    assert difference(requests, first) <= TOLERANCE
    again = llm.generate(requests[::-1], PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again[::-1]] == [o.outputs[0].token_ids for o in first]


def test_preempted_requests():
    """Requests that lose their blocks have their sources encoded and stored anew."""
    llm = make_llm(num_gpu_blocks_override=30, enable_prefix_caching=False)
    requests, params = make_requests(4), PARAMS.clone()
    params.max_tokens = 40
    outputs = llm.generate(requests, params, use_tqdm=False)
    assert difference(requests, outputs) <= TOLERANCE
    assert next(m for m in llm.get_metrics() if m.name == "vllm:num_preemptions").value > 0


def test_a_broken_model_is_noticed(monkeypatch):
    """Negative twins: cross attention to another request's source, mel without clamp, no positions."""
    from octavo.runtime.models.whisper import WhisperEncoder
    from octavo.runtime.worker.source import SourcePart

    requests = make_requests(2)

    def spoiled():
        return difference(requests, make_llm().generate(requests, PARAMS, use_tqdm=False))

    slots, encode = SourcePart._slots, WhisperEncoder.encode
    with monkeypatch.context() as patch:
        patch.setattr(SourcePart, "_slots", lambda part, group, row, n: slots(part, group, row ^ 1, n))
        assert spoiled() > 10 * TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr(spectrogram, "_RANGE", 100.0)
        assert spoiled() > 10 * TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr(
            WhisperEncoder, "encode", lambda tower, items: [x.roll(1, 0) for x in encode(tower, items)]
        )
        assert spoiled() <= TOLERANCE  # the order of what is read does not count
        patch.setattr(WhisperEncoder, "encode", lambda tower, items: [x * 1.01 for x in encode(tower, items)])
        assert spoiled() > 10 * TOLERANCE


@pytest.mark.parametrize("num_mels", [80, 128])
def test_spectrograms(num_mels):
    """The same as transformers', in NumPy to the bit nearly, in torch as near as floats are."""
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    filters = mel_filter_bank(201, num_mels, 0.0, 8000.0, RATE, "slaney", "slaney")
    np.testing.assert_allclose(mel_filters(RATE, num_mels, 400), filters, atol=1e-9)
    for seed in range(2):
        audio = np.pad(make_audio(seed, 2.7), (0, RATE))
        ours = log_mel(audio, RATE, num_mels, 400, 160)
        np.testing.assert_allclose(ours, extractor._np_extract_fbank_features([audio], "cpu")[0], atol=1e-6)
        np.testing.assert_allclose(ours, extractor._torch_extract_fbank_features(audio), atol=2e-4)


TIMED = PROMPT[:-1]
"""A prompt that lets the model write times."""


@torch.inference_mode()
def ruled_tokens(seed, count):
    """What transformers' rules make of its logits, one token after the other."""
    oracle, folder = oracle_of()
    config = GenerationConfig.from_pretrained(folder)
    rules = [
        SuppressTokensLogitsProcessor(config.suppress_tokens),
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, len(TIMED)),
        WhisperTimeStampLogitsProcessor(config, begin_index=len(TIMED)),
    ]
    encoded = oracle.model.encoder(features([make_audio(seed)]))
    ids = torch.tensor([TIMED])
    for _ in range(count):
        scores = oracle(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1]
        for rule in rules:
            scores = rule(ids, scores)
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=-1)
    return ids[0, len(TIMED) :].tolist()


@pytest.mark.parametrize("preempt", [False, True])
def test_rules_of_times(preempt):
    """The same tokens as by transformers' logits processors, its lists of forbidden tokens included."""
    few = {"num_gpu_blocks_override": 30, "enable_prefix_caching": False} if preempt else {}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = make_llm(**few).generate(
        [request_of(i, prompt=TIMED) for i in range(4)], params, use_tqdm=False
    )
    for seed, output in enumerate(outputs):
        ours = list(output.outputs[0].token_ids)
        assert sum(token >= FIRST_TIME for token in ours) > 1
        assert ours == ruled_tokens(seed, 60)


@torch.inference_mode()
def test_times_of_tokens():
    """Attention of the same heads, and the same times, as transformers' for tokens of its own choice."""
    oracle, folder = oracle_of()
    heads = GenerationConfig.from_pretrained(folder).alignment_heads
    llm, audio, tokens = make_llm(), make_audio(1), [70, 71, 32, 80, 81, 82, 32, 90, 91]
    request = request_of(1, prompt=[*PROMPT, *tokens])
    params = SamplingParams(max_tokens=1, returns_alignment=True, skip_reading_prefix_cache=True)
    [output] = llm.generate([request], params, use_tqdm=False)
    weights = np.frombuffer(output.pooled.data, np.float32).reshape(output.pooled.shape)
    ids = torch.tensor([[*PROMPT, *tokens]])
    found = oracle(
        input_features=features([audio]), decoder_input_ids=ids, output_attentions=True
    ).cross_attentions
    expected = torch.stack([found[layer][0, head] for layer, head in heads]).detach()
    np.testing.assert_allclose(weights, expected.numpy(), atol=1e-5)
    num_frames = len(audio) // 160
    made = SimpleNamespace(cross_attentions=[found], sequences=torch.cat([ids, ids[:, :1]], dim=1))
    theirs = oracle._extract_token_timestamps(
        _Outputs(made), heads, num_frames=num_frames, num_input_ids=len(PROMPT)
    )
    ours = time_tokens(weights[:, len(PROMPT) :], num_frames // 2)
    np.testing.assert_allclose(ours, theirs[0, len(PROMPT) : -1].numpy(), atol=0.02)
    assert len(set(ours.tolist())) > 3


class _Outputs(SimpleNamespace):
    """Has no beams."""

    def __init__(self, made):
        super().__init__(**vars(made))

    def __contains__(self, name):
        return hasattr(self, name)


def test_forms_of_prompts():
    """vLLM's two parts, a prompt without its beginning, arrays at the model's rate; and what is none."""
    llm, audio = make_llm(), make_audio(3)
    text = "<|en|><|transcribe|><|notimestamps|>"
    forms = [
        {"prompt": f"<|startoftranscript|>{text}", "multi_modal_data": {"audio": audio}},
        {"prompt": text, "multi_modal_data": {"audio": [(audio, RATE)]}},
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (audio, RATE)}},
            "decoder_prompt": {"prompt_token_ids": PROMPT},
        },
    ]
    outputs = llm.generate(forms, PARAMS, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == PROMPT for output in outputs)
    for form, error in [
        ("text alone", "needs one audio; 0 are given"),
        ({"prompt": "", "multi_modal_data": {"audio": [audio, audio]}}, "needs one audio; 2 are given"),
        (
            {"prompt": "", "multi_modal_data": {"audio": make_audio(0, 2.1)}},
            "lasts 2.1 s; the model hears 2 s",
        ),
        ({"prompt": "", "multi_modal_data": {"audio": audio.astype(int)}}, "must be the bytes of a file"),
        ({"prompt": "", "multi_modal_data": {"audio": audio * np.nan}}, "finite numbers"),
        ({"prompt": "", "multi_modal_data": {"image": audio}}, r"At most 0 image\(s\)"),
    ]:
        with pytest.raises(RequestError, match=error):
            llm.generate(form, PARAMS, use_tqdm=False)
    slow = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (audio[::2], RATE // 2)}}
    assert llm.generate(slow, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_samples_of_one_source():
    """Children of n > 1 read what their leader's encoder made."""
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    together = make_llm().generate([request_of(2), request_of(3)], params, use_tqdm=False)
    params_alone = SamplingParams(temperature=1.0, seed=6, max_tokens=12, ignore_eos=True)
    [alone] = make_llm().generate([request_of(3)], params_alone, use_tqdm=False)
    assert together[1].outputs[1].token_ids == alone.outputs[0].token_ids
