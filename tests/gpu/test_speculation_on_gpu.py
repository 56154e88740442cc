"""Drafts that are verified and guessed on the GPU, in captured steps without a host, change no text."""

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu_speculation import DRAFT_VOCAB, write_head
from octavo import LLM, SamplingParams, TokensPrompt
from octavo.runtime.worker.chained_steps import ChainedSteps
from tests.tiny_models import make_oracle, save, tiny_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
COMMON = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 96}
PROMPTS = [TokensPrompt(prompt_token_ids=[(31 * i + 7 * j) % 900 for j in range(9 + i)]) for i in range(10)]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20 + 4 * i, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def texts(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    (root / "target").mkdir()
    (root / "target" / "config.json").write_text(json.dumps(CONFIG))
    return str(root / "target"), str(write_head(root / "head", CONFIG))


def guessing(method, target, head):
    """What the engine is told so that it guesses three tokens whenever it can."""
    config = {"method": method, "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    shortest = {"prompt_lookup_min": 1}
    drafts = {
        "eagle3": {"model": head},
        "draft_model": {"model": target},
        "ngram": shortest,
        "ngram_gpu": shortest,
    }
    return config | drafts.get(method, {})


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["suffix", "ngram_gpu", "draft_model", "eagle3"])
@pytest.mark.parametrize("shift", [0, 1], ids=["", "shifted"])
def test_chained_steps_change_nothing(folders, monkeypatch, method, shift):
    """Shifted, the negative twin: requests are noted as shorter than they are."""
    target, head = folders
    verify, rows = ChainedSteps.verify, []

    def noted(steps, inputs, *rest):
        lasts = verify(steps, inputs, *rest)
        rows.append(len(inputs.rows))
        steps.state.lengths -= shift
        return lasts

    monkeypatch.setattr(ChainedSteps, "verify", noted)
    with LLM(target, **COMMON) as llm:
        plain = texts(llm)
    with LLM(target, **COMMON, speculative_config=guessing(method, target, head)) as llm:
        texts(llm)
        found = texts(llm)  # suffixes are known now
        values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    equal = sum(a == b for a, b in zip(found, plain, strict=True))
    assert (equal >= 9) != shift, f"{equal} of {len(PROMPTS)} texts are the same"
    assert len(rows) >= 3
    assert method == "ngram_gpu" or values["vllm:spec_decode_num_draft_tokens"] > 100
    if method in ("suffix", "draft_model") and not shift:
        assert values["vllm:spec_decode_num_accepted_tokens"] > 100


def write_block_head(folder):
    """A head of DFlash, with normal-valued weights."""
    size, inner, kv = (CONFIG[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    shapes = {"fc": (size, 2 * size), "hidden_norm": (size,), "norm": (size,)}
    for i in range(2):
        layer = {
            "self_attn.q_proj": (size, size),
            "self_attn.k_proj": (kv, size),
            "self_attn.v_proj": (kv, size),
            "self_attn.o_proj": (size, size),
            "self_attn.q_norm": (kv,),
            "self_attn.k_norm": (kv,),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    folder.mkdir()
    save_file(
        {
            f"{name}.weight": torch.randn(shape).bfloat16() * (shape[-1] ** -0.5 if shape[1:] else 1)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    own = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2}
    own["dflash_config"] = {"mask_token_id": 5, "target_layer_ids": [1, 3]}
    (folder / "config.json").write_text(json.dumps(CONFIG | own))
    return str(folder)


@pytest.mark.gpu
def test_blocks_change_nothing(folders, tmp_path):
    """All guesses of DFlash at once, in captured steps."""
    head = write_block_head(tmp_path / "head")
    with LLM(folders[0], **COMMON) as llm:
        plain = texts(llm)
    config = {"method": "dflash", "model": head, "num_speculative_tokens": 7}
    with LLM(
        folders[0], **COMMON, speculative_config=config | {"enable_adaptive_verification": False}
    ) as llm:
        found = texts(llm)
        values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert sum(a == b for a, b in zip(found, plain, strict=True)) >= 9
    assert values["vllm:spec_decode_num_draft_tokens"] > 100


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM"])
def test_states_pass_what_came_true(tmp_path, architecture):
    """Of a small recurrent model the second texts are guessed by suffixes of the first."""
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    options = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 96, "dtype": "float32"}
    prompts = [
        TokensPrompt(prompt_token_ids=[(31 * i + 7 * j) % 120 for j in range(9 + i)]) for i in range(10)
    ]
    config = {"method": "suffix", "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    made = []
    for given in ({}, {"speculative_config": config}):
        with LLM(str(folder), **options, **given) as llm:
            for _ in range(2):
                outputs = [out.outputs[0].token_ids for out in llm.generate(prompts, PARAMS, use_tqdm=False)]
            made.append(outputs)
            values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert sum(a == b for a, b in zip(*made, strict=True)) >= 9
    assert values["vllm:spec_decode_num_accepted_tokens"] > 100
