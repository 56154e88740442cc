"""Phi-4 multimodal against transformers' class and processors, through the whole engine, in float32."""

import copy
import json
import warnings
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoConfig
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import Phi4MultimodalForCausalLM

from octavo import LLM, LoRARequest, SamplingParams
from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.config.checkpoint import read_checkpoint
from octavo.config.phi4_multimodal import own_adapters, read_phi4
from octavo.frontend.media.processors.phi4 import Phi4AudioProcessor, Phi4Processor
from octavo.runtime.models.phi4_multimodal import Phi4MultimodalEncoder
from tests import first_phi4, peft_adapters
from tests.integration.test_cuda_graphs import repeats
from tests.tiny_media import IMAGE, TEXT, VISION, save_tokenizer
from tests.tiny_speech import RATE, make_audio, spread

__all__ = ["repeats"]
SOUND, TOLERANCE = 116, 1e-4
SETTINGS = {"dynamic_hd": 4}
PARAMS = SamplingParams(
    temperature=0, max_tokens=4, logprobs=-1, ignore_eos=True, allowed_token_ids=list(range(3, 100))
)
CONFIG = {
    **TEXT,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "vision_config": {**VISION, "image_token_id": IMAGE},
    "audio_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_blocks": 2,
        "num_attention_heads": 4,
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 8,
        "bias_max_distance": 9,
        "audio_token_id": SOUND,
    },
}
READ = read_phi4({**CONFIG, "model_type": "phi4_multimodal"})
SIZES = [(300, 200), (460, 900), (1900, 500), (449, 449)]
"""Of pictures in one square, in several, in fewer than they would have, and barely in two."""
SCALED = [
    (SIZES[0], (298, 448), (1, 1)),
    (SIZES[3], (896, 896), (2, 2)),
]
"""Sizes, (height, width) before white fills up the squares, and how many of these there are."""


@cache
def oracle_of():
    full = AutoConfig.for_model("phi4_multimodal", **CONFIG)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        oracle = Phi4MultimodalForCausalLM._from_config(full, attn_implementation="eager").eval()
    spread(oracle, 0)
    with torch.no_grad():
        normal = oracle.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
        normal.global_mean.uniform_(4, 8)
        normal.global_invstd.uniform_(0.2, 0.4)
    folder = Path(mkdtemp())
    oracle.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    save_tokenizer(folder)
    return oracle, folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """PEFT's model with a checkpoint's adapters, "vision" and "speech", and the folder that brings them."""
    oracle, plain = oracle_of()
    folder = tmp_path_factory.mktemp("phi4")
    for file in plain.iterdir():
        (folder / file.name).symlink_to(file)
    targets = r"model\.layers\..*(qkv_proj|o_proj|gate_up_proj|down_proj)"
    for seed, (name, rank) in enumerate((("vision", 70), ("speech", 5))):
        made = peft_adapters.adapt(oracle, seed, 0.1, r=rank, lora_alpha=2 * rank, target_modules=targets)
        peft_adapters.save(made, folder / f"{name}-lora")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as peft_adapters does
        model = peft.PeftModel.from_pretrained(copy.deepcopy(oracle), folder / "vision-lora", "vision")
        model.load_adapter(folder / "speech-lora", "speech")
    return model.eval(), folder


@pytest.fixture
def first(adapted, tmp_path, monkeypatch):
    """The same as Microsoft wrote it: the folder, and where octavo keeps what it copies."""
    _, plain = oracle_of()
    folder, kept = tmp_path / "first", tmp_path / "kept"
    folder.mkdir()
    first_phi4.write(CONFIG, plain, adapted[1], folder)
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(plain / name)
    monkeypatch.setattr("octavo.config.phi4_multimodal.env", SimpleNamespace(cache_dir=lambda: kept))
    return folder, kept


def make_llm(folder=None, **options):
    exact = {"max_model_len": 8192, "dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    return LLM(str(folder or oracle_of()[1]), logprobs_mode="raw_logits", max_logprobs=-1, **exact | options)


def make_image(width, height):
    rng = np.random.default_rng(width)
    slope = np.linspace(0, 255, width)[None, :, None] * rng.random(3)
    noisy = (slope + rng.integers(0, 90, (height, width, 3))).clip(0, 255)
    return Image.fromarray(noisy.astype(np.uint8))


def make_request(sizes=(), seconds=(), seed=0):
    rng = np.random.default_rng(seed)
    ids = [5, 6]
    for marker in [*[IMAGE] * len(sizes), *[SOUND] * len(seconds)]:
        ids += [marker, *rng.integers(3, 100, 3).tolist()]
    data = {}
    if sizes:
        data["image"] = [make_image(*size) for size in sizes]
    if seconds:
        data["audio"] = [(make_audio(seed + i, length), RATE) for i, length in enumerate(seconds)]
    return {"prompt_token_ids": ids, "multi_modal_data": data}


REQUESTS = [
    ((SIZES[0],), ()),
    ((), (1.7,)),
    ((SIZES[1], SIZES[3]), ()),
    ((), (1.31, 0.4, 2.0)),
    ((SIZES[2],), (0.9,)),
]


@torch.inference_mode()
def oracle_logits(ids, data, oracle=None):
    """Each sound by itself, as its neighbours would change where it ends."""
    oracle = oracle or oracle_of()[0]
    model, tokens = oracle.model, torch.tensor([ids])
    embeds, parts = model.embed_tokens(tokens), model.embed_tokens_extend
    if images := data.get("image"):
        embeds = parts.image_embed(tokens, embeds, **oracle_inputs(images))
    mode, heard = "vision" if images else "speech", []
    for sound, _ in data.get("audio", ()):
        found = Phi4MultimodalFeatureExtractor()(sound, sampling_rate=RATE, return_tensors="pt")
        count = int(found["audio_embed_sizes"][0])
        given = found["audio_input_features"], found["audio_embed_sizes"], None, mode
        own = torch.full((1, count), SOUND)
        heard.append(parts.audio_embed(own, torch.zeros(1, count, embeds.shape[-1]), *given)[0])
    if heard:
        embeds[tokens == SOUND] = torch.cat(heard)
    return oracle(inputs_embeds=embeds).logits[0].float()


def oracle_inputs(images):
    """Squares and masks as transformers' processor makes them, filled up to equally many."""
    processor = Phi4Processor(READ, SETTINGS, lambda text: [1])
    found = [processor.prepare(image, processor.settings) for image in images]
    most = max(len(each["pixel_values"]) for each in found)
    values = torch.zeros(len(images), most, 3, 448, 448)
    masks = torch.ones(len(images), most, 32, 32)
    for number, each in enumerate(found):
        rows, columns, high, wide = each["grid"].tolist()
        values[number, : 1 + rows * columns] = torch.tensor(each["pixel_values"])
        whole = torch.zeros(rows * 32, columns * 32)
        whole[:high, :wide] = 1
        squares = whole.unflatten(1, (columns, 32)).unflatten(0, (rows, 32)).transpose(1, 2).flatten(0, 1)
        masks[number, 1 : 1 + rows * columns] = squares
    sizes = torch.tensor([[448 * count for count in each["grid"][:2]] for each in found])
    return {"image_pixel_values": values, "image_sizes": sizes, "image_attention_mask": masks}


def difference(output, data, oracle=None):
    tokens = output.outputs[0].token_ids
    expected = oracle_logits([*output.prompt_token_ids, *tokens[:-1]], data, oracle)[-len(tokens) :]
    ours = torch.tensor([[row[i].logprob for i in range(len(row))] for row in output.outputs[0].logprobs])
    return (ours - expected[:, : ours.shape[1]]).abs().max().item()


LEVEL = 2 / 255
"""Of pixels: torch and Pillow round a few otherwise."""


def as_torch(image, height, width, grid):
    """The processor's two operations on pixels, by torch."""
    array = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None]
    resized = functional.interpolate(array, (height, width), mode="bilinear", antialias=True)[0]
    rows, columns = grid
    whole = functional.pad(resized, (0, columns * 448 - width, 0, rows * 448 - height), value=255)
    whole = (whole.float() / 255 - 0.5) / 0.5
    small = functional.interpolate(whole[None], (448, 448), mode="bicubic")[0]
    return whole, small


@pytest.mark.parametrize(("size", "scaled", "grid"), SCALED)
def test_pixels(size, scaled, grid):
    """Resized and filled up with white; a copy without antialias."""
    processor, image = Phi4Processor(READ, SETTINGS, lambda text: [1]), make_image(*size)
    ours = processor.prepare(image, processor.settings)
    whole, small = as_torch(image, *scaled, grid)
    rows, columns = grid
    squares = whole.view(3, rows, 448, columns, 448).permute(1, 3, 0, 2, 4).flatten(0, 1)
    for got, expected in (
        (ours["pixel_values"][1:], squares.numpy()),
        (ours["pixel_values"][0], small.numpy()),
    ):
        off = np.abs(got - expected)
        assert off.max() < 3 * LEVEL and (off > 1e-5).mean() < 0.01


@pytest.mark.parametrize("size", SIZES)
def test_images_of_the_processor(size):
    """All that transformers' own processor makes, where torchvision is installed."""
    pytest.importorskip("torchvision")
    module = import_module("transformers.models.phi4_multimodal.image_processing_phi4_multimodal")
    processor, image = Phi4Processor(READ, SETTINGS, lambda text: [1]), make_image(*size)
    theirs = module.Phi4MultimodalImageProcessor(**SETTINGS)([image], return_tensors="pt")
    ours = oracle_inputs([image])
    for name, values in ours.items():
        off = (values - theirs[name]).abs()
        assert off.max() < 3 * LEVEL and (off > 1e-5).float().mean() < 0.01, name
    tokens = processor.tokens(processor.prepare(image, processor.settings))
    assert len(tokens) == theirs["num_img_tokens"][0]


def test_spectrogram():
    sound = make_audio(3, 1.234)
    processor = Phi4AudioProcessor(READ, {}, lambda text: [1])
    ours = processor.prepare(sound, processor.settings)
    theirs = Phi4MultimodalFeatureExtractor()(sound, sampling_rate=RATE, return_tensors="pt")
    expected = theirs["audio_input_features"][0].numpy()
    np.testing.assert_allclose(ours["input_features"], expected, atol=2e-5)
    assert len(processor.tokens(ours)) == int(theirs["audio_embed_sizes"][0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"long_prefill_token_threshold": 97}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["whole", "chunks_of_97", "two_ranks"],
)
def test_logits(options):
    """Of pictures, of sounds, and of both in a prompt; then in another order, with prefix hits."""
    requests = [make_request(*parts, seed) for seed, parts in enumerate(REQUESTS)]
    with make_llm(**options) as llm:
        outputs = llm.generate(requests, PARAMS, use_tqdm=False)
        for request, output in zip(requests, outputs, strict=True):
            assert difference(output, request["multi_modal_data"]) <= TOLERANCE
        again = llm.generate(requests[::-1], PARAMS, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again[::-1]] == [o.outputs[0].token_ids for o in outputs]
    assert all(output.num_cached_tokens > 0 for output in again)


OWN = [((), ()), ((SIZES[0],), ()), ((), (0.9,)), ((SIZES[0],), (0.7,))]
"""Texts have no adapter; images, with sounds or without, that of images."""


@pytest.mark.parametrize("layout", ["transformers", "first"])
def test_the_checkpoint_s_adapters(adapted, layout, request):
    """In one batch, each request is as of PEFT's model with what its items need, or with what it names."""
    model, saved = adapted
    folder = saved if layout == "transformers" else request.getfixturevalue("first")[0]
    requests = [make_request(*parts, seed) for seed, parts in enumerate([*OWN, OWN[2]])]
    named = [None] * 4 + [LoRARequest("eyes", 1, str(saved / "vision-lora"))]
    with make_llm(folder) as llm:
        outputs = llm.generate(requests, PARAMS, use_tqdm=False, lora_request=named)
    with make_llm(folder, default_mm_loras={"image": ""}) as llm:  # the negative twin
        bare = llm.generate(requests[1:4], PARAMS, use_tqdm=False)
    for output, request, adapter in zip(
        outputs, requests, ["", "vision", "speech", "vision", "vision"], strict=True
    ):
        model.set_adapter(adapter or "vision")
        with nullcontext() if adapter else model.disable_adapter():
            found = difference(output, request["multi_modal_data"], model.base_model.model)
        assert found <= TOLERANCE, adapter
    for output, request in zip(bare, requests[1:4], strict=True):
        assert difference(output, request["multi_modal_data"]) <= TOLERANCE
        model.set_adapter("vision")
        assert difference(output, request["multi_modal_data"], model.base_model.model) > 10 * TOLERANCE


@pytest.mark.slow
def test_both_layouts_have_the_same_bits(adapted, first):
    """Every logit; what changes one weight, of the tower or of an adapter, is noticed."""
    requests = [make_request(*parts, seed) for seed, parts in enumerate(OWN)]

    def logits(folder):
        with make_llm(folder) as llm:
            outputs = llm.generate(requests, PARAMS, use_tqdm=False)
        return [
            [{i: one.logprob for i, one in row.items()} for row in o.outputs[0].logprobs] for o in outputs
        ]

    expected = logits(adapted[1])
    assert logits(first[0]) == expected
    weights = load_file(first[0] / "model.safetensors")
    for name, changes in (("image_embed.glb_GN", [1, 3]), ("0.mlp.down_proj.lora_B.speech.weight", [2])):
        [whole] = [key for key in weights if key.endswith(name)]
        save_file(weights | {whole: weights[whole] + 0.1}, first[0] / "model.safetensors")
        found = logits(first[0])
        assert [at for at in range(len(OWN)) if found[at] != expected[at]] == changes


def test_adapters_are_copied_once(first):
    folder, kept = first
    made = [read_checkpoint(folder).config for _ in range(2)]
    found = [own_adapters(folder, config) for config in made]
    assert found[0] == found[1] and found[0].keys() == {"image", "audio"}
    assert sorted(map(str, (kept / "adapters").iterdir())) == sorted(found[0].values())
    (folder / "vision-lora").mkdir()
    assert own_adapters(folder, made[0]) == found[0] | {"image": str(folder / "vision-lora")}


def test_what_is_wrong_with_a_first_checkpoint(first):
    folder, _ = first
    written = json.loads((folder / "config.json").read_text())
    for change, told in (
        ({"embd_layer": None}, "Phi4MMForCausalLM cannot be read"),
        ({"embd_layer": written["embd_layer"] | {"image_embd_layer": {"use_hd_transform": False}}}, "only"),
    ):
        (folder / "config.json").write_text(json.dumps(written | change))
        with pytest.raises((BadCheckpoint, Unsupported), match=told):
            read_checkpoint(folder)
    weights = (folder / "model.safetensors").read_bytes()
    for broken in (b"", weights[:9], weights[:-1], (1 << 60).to_bytes(8, "little") + weights[8:]):
        (folder / "model.safetensors").write_bytes(broken)
        with pytest.raises(BadCheckpoint, match="is no safetensors file"):
            own_adapters(folder, written)


def test_conversations():
    """Both are taken in a conversation; the tokens of markers are those of the config."""
    image, sound = make_image(*SIZES[0]), make_audio(0, 0.4)
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": "5 6"}]
    parts.append({"type": "audio", "audio": (sound, RATE)})
    with make_llm() as llm:
        asked = [{"role": "user", "content": parts}], PARAMS
        [output] = llm.chat(*asked, use_tqdm=False, chat_template="{{ messages[0]['content'] }}")
    ids = output.prompt_token_ids
    assert ids.index(IMAGE) < ids.index(SOUND) < ids.index(5), "markers stand before the text"
    assert difference(output, {"image": [image], "audio": [(sound, RATE)]}) <= TOLERANCE


def test_prompts_that_count(first):
    """As Microsoft writes them, <|image_1|>; without items that is text."""
    prompt, data = "5 <|image_1|> 6 <|audio_1|> 7", make_request((SIZES[0],), (0.4,))["multi_modal_data"]
    with make_llm(first[0]) as llm:
        [output] = llm.generate({"prompt": prompt, "multi_modal_data": data}, PARAMS, use_tqdm=False)
        [plain] = llm.generate(prompt, PARAMS, use_tqdm=False)
    ids = output.prompt_token_ids
    assert ids.index(5) < ids.index(IMAGE) < ids.index(6) < ids.index(SOUND) < ids.index(7)
    assert not {IMAGE, SOUND} & set(plain.prompt_token_ids)


def test_wrong_defaults(adapted, tmp_path):
    with pytest.raises(ConfigError, match="modalities are image, video, audio; got \\['smell'\\]"):
        make_llm(default_mm_loras={"smell": str(adapted[1])})
    with pytest.raises(ConfigError, match="default_mm_loras: No adapter found for"):
        make_llm(default_mm_loras={"image": str(tmp_path)})


def test_captured_images(repeats):
    """Sizes that come again, as a GPU computes them; sounds are not captured."""
    with make_llm() as llm:
        for seed in range(3):
            request = make_request((SIZES[1],), (0.7,), seed)
            noise = np.random.default_rng(seed).integers(0, 255, (*SIZES[1][::-1], 3), np.uint8)
            request["multi_modal_data"]["image"] = [Image.fromarray(noise)]
            [output] = llm.generate([request], PARAMS, use_tqdm=False)
            assert difference(output, request["multi_modal_data"]) <= TOLERANCE
    assert repeats[0] > 0


def test_a_long_sound():
    """What is longer than 40 s is heard in parts."""
    request = make_request((), (43.0,))
    with make_llm() as llm:
        [output] = llm.generate([request], PARAMS, use_tqdm=False)
    assert difference(output, request["multi_modal_data"]) <= TOLERANCE


def test_a_broken_encoder_is_noticed(monkeypatch):
    """Negative twins: fillings are seen; distances do not count; sounds are projected as without images."""
    seen = Phi4MultimodalEncoder._places

    def spoiled(request, name, broken):
        with monkeypatch.context() as patch:
            patch.setattr(name, broken)
            with make_llm() as llm:
                [output] = llm.generate([request], PARAMS, use_tqdm=False)
        return difference(output, request["multi_modal_data"])

    here = "octavo.runtime.models.phi4_multimodal.Phi4MultimodalEncoder"
    picture, both = make_request((SIZES[0],)), make_request((SIZES[0],), (0.7,))
    assert spoiled(picture, f"{here}._places", seen) <= TOLERANCE

    def all_seen(encoder, high, wide):
        places, mask = seen(encoder, high, wide)
        return places, torch.ones_like(mask)

    assert spoiled(picture, f"{here}._places", all_seen) > 10 * TOLERANCE
    distances = "octavo.runtime.layers.distance_bias.DistanceBias.add_to"
    assert spoiled(make_request((), (0.7,)), distances, lambda layer, batch: None) > 10 * TOLERANCE
    alone = "octavo.frontend.media.processors.phi4.Phi4Processor.beside"
    assert spoiled(both, alone, lambda processor, modalities: {}) > 10 * TOLERANCE
