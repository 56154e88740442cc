"""Adapters of what sees, hears and reads sources, against PEFT's own forward, beside rows of the base."""

import pytest
from torch import nn

from octavo.lora.request import LoRARequest
from octavo.runtime.worker.adapters import AdaptersPart
from tests import peft_adapters, tiny_audio
from tests.parity import test_audio_models as audio
from tests.parity import test_media_models as media
from tests.parity import test_text_to_text as texts
from tests.parity import test_whisper as whisper

TOLERANCE, SHOWS = 1e-4, 1e-2
LLAVA, QWEN = "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
KINDS = {"everywhere": {}, "dora": {"use_dora": True}, "encoder": {"lora_bias": True}, "text": {}}
TEXT = ("language_model", "text_model", "decoder")
"""In the names of matrices of text models."""
ROWS = ["everywhere", None, "dora", "encoder", None, "text"]
"""Of a batch: kinds of adapters, None for the base."""


def adapt(oracle, root, kinds=KINDS, matrices=(nn.Linear,), **more):
    """Of each kind a request and PEFT's model, with adapters of all matrices or those of a part."""
    names = [name for name, module in oracle.named_modules() if isinstance(module, matrices)]
    names = [name for name in names if "lm_head" not in name and "proj_out" not in name]
    of_text = {name for name in names if any(part in name for part in TEXT)}
    chosen = {"text": of_text, "encoder": {*names} - of_text}
    made = {}
    for number, (kind, options) in enumerate(kinds.items(), 1):
        targets = sorted(chosen.get(kind, names))
        model = peft_adapters.adapt(
            oracle, number, 0.1, **{"r": 3, "target_modules": targets} | options | more
        )
        made[kind] = LoRARequest(kind, number, peft_adapters.save(model, root / kind)), model
    return made


def check(made, rows, requests, outputs, difference):
    """Each row is its own model's, and only its."""
    for kind, request, output in zip(rows, requests, outputs, strict=True):
        own = made[kind][1] if kind else None
        assert difference(request, output, own) <= TOLERANCE, kind
        others = [model for name, (_, model) in made.items() if name != kind] + ([None] if kind else [])
        assert all(difference(request, output, other) > SHOWS for other in others), kind


def try_images(architecture, root, kinds=KINDS, rows=ROWS, matrices=(nn.Linear,), **options):
    made = adapt(media.oracle_of(architecture)[0], root, kinds, matrices)
    requests = media.make_requests(architecture, [1 + i % 2 for i in range(len(rows))])
    llm = media.make_llm(architecture, enable_lora=True, **options)
    loras = [made[kind][0] if kind else None for kind in rows]

    def difference(request, output, oracle):
        return media.differences(architecture, [request], [output], oracle)[0]

    for order in (1, -1):  # again in another order, with encoders' outputs and blocks in the caches
        outputs = llm.generate(requests[::order], media.PARAMS, lora_request=loras[::order], use_tqdm=False)
        check(made, rows, requests, outputs[::order], difference)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("architecture", media.FAMILIES)
def test_images(architecture, tmp_path):
    try_images(architecture, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "matrix"), [(LLAVA, nn.Conv2d), (QWEN, nn.Conv3d)], ids=["conv2d", "conv3d"]
)
def test_patches(architecture, matrix, tmp_path):
    """Whose embedding is a convolution; in chunks."""
    kinds = {"everywhere": {}, "dora": {"use_dora": True}}
    try_images(architecture, tmp_path, kinds, ["everywhere", None, "dora"], matrix, **media.CHUNKS)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["weights", "data"])
def test_two_ranks(mode, tmp_path):
    """Each with a part of the encoder's weights, or with all of them and a part of the images."""
    options = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": mode}
    try_images("Qwen3VLForConditionalGeneration", tmp_path, **options)


def test_outputs_are_shared_where_the_encoder_is_the_same(tmp_path, monkeypatch):
    """Of one image: by the base and adapters of the text model; each adapter of the encoder has its own."""
    oracle = media.oracle_of(LLAVA)[0]
    made = adapt(oracle, tmp_path, {"text": {}, "encoder": {}, "everywhere": {}})
    llm, [request] = media.make_llm(LLAVA, enable_lora=True), media.make_requests(LLAVA, (1,))

    def num_encoded():
        return next(m.value for m in llm.get_metrics() if m.name == "vllm:mm_encoder_items")

    for kinds in ([None, "text", "encoder", "everywhere"], ["everywhere", None, "encoder", "text"]):
        loras = [made[kind][0] if kind else None for kind in kinds]
        outputs = llm.generate([request] * 4, media.PARAMS, lora_request=loras, use_tqdm=False)
        assert num_encoded() == 3
        assert media.differences(LLAVA, [request], [outputs[kinds.index(None)]])[0] <= TOLERANCE
        llm.reset_prefix_cache()
    encoding = AdaptersPart.encoding
    monkeypatch.setattr(AdaptersPart, "encoding", lambda part, row: (encoding(part, row)[0], b""))
    llm.llm_engine.reset_encoder_cache()
    outputs = llm.generate([request] * 4, media.PARAMS, lora_request=loras, use_tqdm=False)
    assert num_encoded() == 4, "one for all, without the adapter in the key"
    assert media.differences(LLAVA, [request], outputs[:1], made["everywhere"][1])[0] > SHOWS


def test_activated_adapters_are_refused(tmp_path):
    """They change tokens from one on; an encoder has none. Requests beside are right."""
    kinds = {"encoder": {"alora_invocation_tokens": [5]}, "text": {}}
    made = adapt(media.oracle_of(LLAVA)[0], tmp_path, kinds)
    llm, [request] = media.make_llm(LLAVA, enable_lora=True), media.make_requests(LLAVA, (1,))
    request["prompt_token_ids"] += [5, 6]
    loras = [made[kind][0] for kind in kinds]
    refused, output = llm.generate([request] * 2, media.PARAMS, lora_request=loras, use_tqdm=False)
    assert "change layers of the text model only" in refused.outputs[0].error
    assert media.differences(LLAVA, [request], [output], made["text"][1])[0] <= TOLERANCE


@pytest.mark.matrix(3)
@pytest.mark.parametrize("architecture", audio.FAMILIES)
def test_sounds(architecture, tmp_path, monkeypatch):
    oracle, folder = tiny_audio.oracle_of(architecture)
    made = adapt(oracle, tmp_path)
    requests = audio.make_requests(architecture, [1 + i % 2 for i in range(len(ROWS))])
    llm = audio.make_llm(architecture, enable_lora=True)
    loras = [made[kind][0] if kind else None for kind in ROWS]
    outputs = llm.generate(requests, audio.PARAMS, lora_request=loras, use_tqdm=False)

    def difference(request, output, own):
        monkeypatch.setattr(audio, "oracle_of", lambda architecture: (own or oracle, folder))
        return audio.difference(architecture, [request], [output])

    check(made, ROWS, requests, outputs, difference)


def test_speech(tmp_path, monkeypatch):
    """Of Whisper: encoder, decoder and what it reads of the encoder."""
    oracle, folder = whisper.oracle_of()
    made = adapt(oracle, tmp_path, task_type=None)
    requests, llm = whisper.make_requests(len(ROWS)), whisper.make_llm(enable_lora=True)
    loras = [made[kind][0] if kind else None for kind in ROWS]
    outputs = llm.generate(requests, whisper.PARAMS, lora_request=loras, use_tqdm=False)

    def difference(request, output, own):
        monkeypatch.setattr(whisper, "oracle_of", lambda: (own or oracle, folder))
        return whisper.difference([request], [output])

    check(made, ROWS, requests, outputs, difference)


@pytest.mark.parametrize("kind", texts.KINDS)
def test_sources_of_text(kind, tmp_path, monkeypatch):
    oracle, folder = texts.oracle_of(kind)
    made = adapt(oracle, tmp_path, task_type=None)
    requests, llm = texts.make_requests(len(ROWS)), texts.make_llm(kind, enable_lora=True)
    loras = [made[own][0] if own else None for own in ROWS]
    outputs = llm.generate(requests, texts.PARAMS, lora_request=loras, use_tqdm=False)

    def difference(request, output, own):
        monkeypatch.setattr(texts, "oracle_of", lambda kind: (own or oracle, folder))
        return texts.difference([request], [output], kind)

    check(made, ROWS, requests, outputs, difference)
