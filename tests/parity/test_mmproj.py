"""A text model in GGUF with its encoder in a file beside it, as llama.cpp's tools write them, against
transformers.
"""

import re
import runpy
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import LLM
from octavo.base.errors import BadCheckpoint, ConfigError, Unsupported
from octavo.config.checkpoint import read_checkpoint
from tests.gguf_models import write_gguf
from tests.gguf_writer import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Tensor, gguf_bytes
from tests.parity.test_media_models import PARAMS, TOLERANCE, differences, make_requests
from tests.tiny_media import TEXT, TINY_MEDIA, VOCAB, make_oracle

LLAVA, IDEFICS, GEMMA, NEXT, INTERN = (
    f"{name}ForConditionalGeneration" for name in ("Llava", "Idefics3", "Gemma3", "LlavaNext", "InternVL")
)
QWEN2, QWEN25, QWEN3, QWEN3_MOE, PIXTRAL, MISTRAL = (
    f"{name}ForConditionalGeneration"
    for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Pixtral", "Mistral3")
)
LATER = {QWEN2: "qwen2vl_merger", QWEN25: "qwen2.5vl_merger", PIXTRAL: "pixtral", MISTRAL: "pixtral"}
LATER |= dict.fromkeys((QWEN3, QWEN3_MOE), "qwen3vl_merger")
LATER_MARKS = {
    119: "<|video_pad|>",
    124: "<|vision_start|>",
    125: "<|vision_end|>",
}
"""Beside that of an image."""
KINDS = {LLAVA: "mlp", IDEFICS: "idefics3", GEMMA: "gemma3", NEXT: "mlp", INTERN: "internvl"}
MARKS = {
    120: "<image>",
    121: "<fake_token_around_image>",
    122: "<global-img>",
    117: "<start_of_image>",
    118: "<end_of_image>",
}
INTERN_MARKS = {120: "<IMG_CONTEXT>", 126: "<img>", 127: "</img>"}


@cache
def oracle_of(architecture):
    """A model whose layers are what a GGUF file can say: every sixth of Gemma 3 is global."""
    if architecture in (NEXT, PIXTRAL, MISTRAL):  # the file's text model is called a Llama, as Mistral's are
        return make_oracle(architecture, text_config={"model_type": "llama", **TEXT})
    if architecture != GEMMA:
        return make_oracle(architecture)
    text = TINY_MEDIA[GEMMA].config["text_config"] | {"layer_types": ["sliding_attention"] * 3}
    return make_oracle(GEMMA, text_config=text)


def write_text(oracle, path, marks):
    """The language model alone."""
    config = oracle.config.text_config
    if "vl" in config.model_type:
        plain = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}.get(config.model_type, "qwen2")
        own = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        own["tie_word_embeddings"] = oracle.config.tie_word_embeddings
        text = AutoModelForCausalLM.from_config(AutoConfig.for_model(plain, **own))
        text.config.model_type = config.model_type
    else:
        text = AutoModelForCausalLM.from_config(config)
    inner = getattr(oracle.model, "language_model", None) or oracle.model.text_model
    text.model.load_state_dict(inner.state_dict())
    text.lm_head.weight.data.copy_(oracle.lm_head.weight)
    tokens = [marks.get(number, f"t{number}") for number in range(VOCAB)]
    types = [3 if number in marks else 1 for number in range(VOCAB)]
    entries = [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "default"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, types)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [])),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
    ]
    with torch.no_grad():
        return write_gguf(text, path, {}, entries=entries)


def tensors_of(oracle, architecture):
    """The encoder's, under the names of the gguf package, but LLaVA's projector, which its own script names.

    LLaVA's script leaves out the layers behind the one that is taken.
    """
    vision = oracle.config.vision_config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    last = f".layers.{vision.num_hidden_layers - 1}."
    for name, parameter in oracle.model.named_parameters():
        is_needless = architecture in (LLAVA, NEXT) and (last in name or "post_layernorm" in name)
        if is_needless or name.startswith(("language_model.", "text_model.")):
            continue
        is_norm = name.endswith("soft_emb_norm.weight")
        values = parameter.detach() + 1 if is_norm else parameter.detach().clone()
        yield gguf_name(names, name, architecture == INTERN), values


def gguf_name(names, name, is_intern):
    for theirs, ours in (("linear_1", "0"), ("linear_2", "2")):
        if not is_intern and name.startswith(f"multi_modal_projector.{theirs}."):
            return name.replace(f"multi_modal_projector.{theirs}", f"mm.{ours}")
    if name == "image_newline":
        return "model.image_newline"
    if name.endswith(("class_embedding", "cls_token")):
        return "v.class_embd"
    if is_intern and name.startswith("vision_tower."):
        return intern_name(name.removeprefix("vision_tower."))
    for theirs, ours in (("layer_norm", "0"), ("linear_1", "1"), ("linear_2", "3")):
        if is_intern and name.startswith(f"multi_modal_projector.{theirs}."):
            return name.replace(f"multi_modal_projector.{theirs}", f"mm.model.mlp.{ours}")
    inner = re.sub(r"^(vision_tower\.vision_model|vision_tower|vision_model)\.", "", name)
    if inner != name:
        name = f"vision_tower.vision_model.{inner}"
    name = name.replace("input_projection_weight", "input_projection.weight").replace(
        "connector.", "model.connector."
    )
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found, name
    return found


INTERN_BLOCKS = {
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.projection_layer": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def intern_name(name):
    """As llama.cpp's converter names what transformers calls otherwise."""
    if name.startswith("embeddings.position"):
        return "v.position_embd.weight"
    if name.startswith("embeddings.patch"):
        return f"v.patch_embd.{name.rpartition('.')[2]}"
    _, _, number, rest = name.split(".", 3)
    if rest.startswith("lambda_"):
        return f"v.blk.{number}.ls{rest[-1]}.weight"
    stem, _, end = rest.rpartition(".")
    return f"v.blk.{number}.{INTERN_BLOCKS[stem]}.{end}"


def write_mmproj(architecture, oracle, path, *, kind="", swapped=False):
    vision, settings = oracle.config.vision_config, TINY_MEDIA[architecture].settings
    key, data, rows = "clip.vision.", bytearray(), []
    exchanged = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
    for own, values in tensors_of(oracle, architecture):
        name = ".".join(exchanged.get(part, part) for part in own.split("."))
        half = name.endswith("attn_q.weight")
        raw = values.contiguous().numpy().astype(np.float16 if half else np.float32)
        values.copy_(torch.from_numpy(raw.astype(np.float32)))
        rows.append(Tensor(name, raw.shape[::-1], int(half), len(data)))
        data += raw.tobytes() + bytes(-raw.nbytes % 32)
    numbers = {
        "image_size": _side(vision.image_size),
        "patch_size": _side(vision.patch_size),
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "block_count": vision.num_hidden_layers - (architecture in (LLAVA, NEXT)),
        "attention.head_count": vision.num_attention_heads,
        "projector.scale_factor": 2,
    }
    if architecture == IDEFICS:
        numbers["preproc_image_size"] = settings["size"]["longest_edge"]
    is_clip = architecture in (LLAVA, NEXT, INTERN)
    mean = [0.48145466, 0.4578275, 0.40821073] if is_clip else [0.5] * 3
    std = [0.26862954, 0.26130258, 0.27577711] if is_clip else [0.5] * 3
    entries = [
        ("general.architecture", STRING, "clip"),
        ("clip.projector_type", STRING, kind or KINDS[architecture]),
        ("clip.has_vision_encoder", BOOL, True),
        ("clip.use_gelu", BOOL, architecture not in (LLAVA, NEXT)),
        (f"{key}attention.layer_norm_epsilon", FLOAT32, vision.layer_norm_eps),
        (f"{key}image_mean", ARRAY, (FLOAT32, mean)),
        (f"{key}image_std", ARRAY, (FLOAT32, std)),
        *((key + name, UINT32, number) for name, number in numbers.items()),
    ]
    if architecture == NEXT:
        grids = [side for grid in settings["image_grid_pinpoints"] for side in grid]
        entries.append((f"{key}image_grid_pinpoints", ARRAY, (INT32, grids)))
    path.write_bytes(gguf_bytes(entries, rows, bytes(data)))
    return path


def _side(given):
    return given[0] if isinstance(given, list | tuple) else given


def later_tensors(oracle, architecture):
    """The encoder's, named and laid out as llama.cpp's converter does; and the text model's of tokens."""
    vision = oracle.config.vision_config
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.MMPROJ, getattr(vision, "depth", 0) or vision.num_hidden_layers
    )
    for name, parameter in oracle.model.named_parameters():
        values = parameter.detach()
        if name.startswith(("language_model.", "text_model.")):
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.startswith("visual.merger.mlp."):
            own = "mm." + name.removeprefix("visual.merger.mlp.")
        if name.startswith(("visual.merger.", "visual.deepstack_")) and "Qwen3" in architecture:
            own = qwen3_name(name, vision.deepstack_visual_indexes)
        if name.endswith("patch_embed.proj.weight"):  # a matrix for each frame of a pair
            yield "v.patch_embd.weight.1", values[:, :, 1]
            values = values[:, :, 0]
        if ".attn.qkv." in name and "Qwen3" not in architecture:
            for part, rows in zip("qkv", values.chunk(3), strict=True):
                yield own.replace("attn_qkv", f"attn_{part}"), rows
            continue
        if "pixtral" in LATER[architecture] and re.search(r"attention\.[qk]_proj", name):
            rows = values.unflatten(0, (vision.num_attention_heads, 2, -1))
            values = rows.transpose(1, 2).flatten(0, 2)
        assert own, name
        yield own, values


def qwen3_name(name, deep):
    """As Qwen3VLVisionModel of llama.cpp's converter: deep layers have their own numbers, not the list's."""
    part, end = name.split(".")[-2:]
    if name.startswith("visual.deepstack_"):
        return f"v.deepstack.{deep[int(name.split('.')[2])]}.{part.removeprefix('linear_')}.{end}"
    return {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[part] + f".{end}"


def write_later(architecture, oracle, path):
    vision, data, rows, key = oracle.config.vision_config, bytearray(), [], "clip.vision."
    for own, values in later_tensors(oracle, architecture):
        raw = values.contiguous().numpy()
        rows.append(Tensor(own, raw.shape[::-1], 0, len(data)))
        data += raw.tobytes() + bytes(-raw.nbytes % 32)
    is_qwen, settings = "Qwen" in architecture, TINY_MEDIA[architecture].settings
    size = vision.embed_dim if architecture == QWEN2 else vision.hidden_size
    numbers = {
        "image_size": 560 if is_qwen else settings["size"]["longest_edge"],
        "patch_size": vision.patch_size,
        "embedding_length": size,
        "feed_forward_length": int(size * vision.mlp_ratio)
        if architecture == QWEN2
        else vision.intermediate_size,
        "block_count": vision.depth if is_qwen else vision.num_hidden_layers,
        "attention.head_count": vision.num_heads if is_qwen else vision.num_attention_heads,
    }
    if architecture == QWEN25:
        numbers |= {"n_wa_pattern": vision.fullatt_block_indexes[0] + 1, "window_size": vision.window_size}
    if "Qwen3" in architecture:
        numbers["image_size"] = vision.patch_size * round(vision.num_position_embeddings**0.5)
    if architecture == MISTRAL:
        numbers["spatial_merge_size"] = oracle.config.spatial_merge_size
    if is_qwen:
        numbers |= {"image_min_pixels": 28 * 28, "image_max_pixels": 70 * 70}
    clip = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    mean, std = (settings.get(f"image_{n}", c) for n, c in zip(("mean", "std"), clip, strict=True))
    entries = [
        ("general.architecture", STRING, "clip"),
        ("clip.projector_type", STRING, LATER[architecture]),
        ("clip.has_vision_encoder", BOOL, True),
        (f"{key}image_mean", ARRAY, (FLOAT32, mean)),
        (f"{key}image_std", ARRAY, (FLOAT32, std)),
        *((key + name, UINT32, number) for name, number in numbers.items()),
    ]
    if "Qwen3" in architecture:
        is_deep = [index in vision.deepstack_visual_indexes for index in range(vision.depth)]
        entries.append((f"{key}is_deepstack_layers", ARRAY, (BOOL, is_deep)))
    path.write_bytes(gguf_bytes(entries, rows, bytes(data)))


@pytest.mark.parametrize("architecture", LATER)
@pytest.mark.parametrize("breaks", [False, True], ids=["as_it_is", "two_tensors_exchanged"])
def test_later_pairs(tmp_path, architecture, breaks):
    """Qwen2-VL to 3-VL, Pixtral, Mistral 3; queries in another order, or other deep layers, are noticed."""
    oracle = oracle_of(architecture)
    is_qwen = "Qwen" in architecture
    marks = (
        LATER_MARKS | {120: "<|image_pad|>"}
        if is_qwen
        else {120: "[IMG]", 121: "[IMG_BREAK]", 122: "[IMG_END]"}
    )
    write_text(oracle, tmp_path / "text.gguf", marks)
    write_later(architecture, oracle, tmp_path / "mmproj.gguf")
    requests = make_requests(architecture)
    if breaks:
        written = (tmp_path / "mmproj.gguf").read_bytes()
        is_third, stems = "Qwen3" in architecture, (b"v.blk.0.attn_%b.weight", b"v.deepstack.%b.fc1.weight")
        first, other, neither = (
            stems[is_third] % part for part in ((b"q", b"k", b"?"), (b"0", b"1", b"?"))[is_third]
        )
        exchanged = written.replace(first, neither).replace(other, first).replace(neither, other)
        (tmp_path / "mmproj.gguf").write_bytes(exchanged)
    _, outputs = run(tmp_path, requests)
    worst = max(differences(architecture, requests, outputs, oracle))
    assert (worst > TOLERANCE) == breaks


@pytest.fixture
def half_queries():
    """Oracles whose weights a half precision has, where files have half precision."""
    for architecture in KINDS:
        for name, parameter in oracle_of(architecture).model.named_parameters():
            if name.endswith("q_proj.weight") and not name.startswith(("language_model.", "text_model.")):
                parameter.data.copy_(parameter.data.half().float())


def as_oracles(oracle, outputs):
    """Where a vocabulary has no token that stands for images, the first one does."""
    for output in outputs:
        output.prompt_token_ids = [i or oracle.config.image_token_id for i in output.prompt_token_ids]


EXACT = {"max_model_len": 1024, "dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}


def run(path, requests, **options):
    llm = LLM(str(path), logprobs_mode="raw_logits", max_logprobs=-1, **EXACT | options)
    return llm, llm.generate(requests, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("variant", ["beside", "named"])
def test_pairs(half_queries, tmp_path, architecture, variant):
    """Found beside the text model, or named; older files of LLaVA have the names of two layers exchanged."""
    oracle = oracle_of(architecture)
    marks = INTERN_MARKS if architecture == INTERN else MARKS
    text = write_text(oracle, tmp_path / "text.gguf", marks)
    is_beside = variant == "beside"
    file = tmp_path / ("mmproj-f32.gguf" if is_beside else "encoder.gguf")
    write_mmproj(architecture, oracle, file, swapped=not is_beside)
    options = {} if is_beside else {"mmproj": str(file)}
    if architecture == INTERN:  # the file does not say how many tiles there may be
        options["mm_processor_kwargs"] = {"max_patches": TINY_MEDIA[INTERN].settings["max_patches"]}
    requests = make_requests(architecture)
    _, outputs = run(tmp_path if is_beside else text, requests, **options)
    as_oracles(oracle, outputs)
    assert max(differences(architecture, requests, outputs, oracle)) <= TOLERANCE


def test_a_vocabulary_without_images(half_queries, tmp_path):
    """As that of LLaVA's files: texts have a marker all the same."""
    oracle = oracle_of(LLAVA)
    text = write_text(oracle, tmp_path / "text.gguf", {})
    write_mmproj(LLAVA, oracle, tmp_path / "mmproj.gguf")
    [request] = make_requests(LLAVA, (1,))
    request["prompt_token_ids"] = [VOCAB if i == 120 else i for i in request["prompt_token_ids"]]
    llm, [output] = run(text, [request])
    assert llm.get_tokenizer().encode("<image>") == [VOCAB]
    as_oracles(oracle, [output])
    assert max(differences(LLAVA, [request], [output], oracle)) <= TOLERANCE


def test_refusals(half_queries, tmp_path):
    oracle = oracle_of(LLAVA)
    text = write_text(oracle, tmp_path / "text.gguf", MARKS)
    write_mmproj(LLAVA, oracle, tmp_path / "mmproj-a.gguf", kind="ldp")
    with pytest.raises(
        Unsupported, match=r"type 'ldp' is not supported. Supported: mlp, idefics3, gemma3, intern"
    ):
        read_checkpoint(text)
    assert read_checkpoint(text, mmproj="none").architecture == "LlamaForCausalLM"
    write_mmproj(IDEFICS, oracle_of(IDEFICS), tmp_path / "mmproj-b.gguf")
    with pytest.raises(
        ConfigError, match=r"Several encoders stand beside text.gguf: choose by mmproj: mmproj-a"
    ):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no file 'x.gguf'"):
        read_checkpoint(text, mmproj="x.gguf")
    write_text(oracle, text, {})
    with pytest.raises(BadCheckpoint, match="has no token <image>"):
        read_checkpoint(text, mmproj=str(tmp_path / "mmproj-b.gguf"))


@pytest.mark.slow
def test_a_trained_encoder(smollm2_path, capsys):
    """The default model names number and colour of squares; pictures of one size share no blocks."""
    runpy.run_path(str(Path(__file__).parents[2] / "tools" / "train_encoder.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for promise in (
        r"(19\d|200) of 200 pictures are described right",
        "swapped, each is described as before: True",
        r"from the cache: 0 of other pictures, [1-9]\d* of the same",
    ):
        assert re.search(promise, printed), printed
