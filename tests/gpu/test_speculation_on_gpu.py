"""Drafts that are verified and guessed on the GPU, in captured steps without a host, change no text."""

import json

import pytest

from benchmarks.gpu_speculation import DRAFT_VOCAB, write_head
from octavo import LLM, SamplingParams, TokensPrompt
from octavo.runtime.worker.chained_steps import ChainedSteps

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
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


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["suffix", "eagle3"])
@pytest.mark.parametrize("shift", [0, 1], ids=["", "shifted"])
def test_chained_steps_change_nothing(folders, monkeypatch, method, shift):
    """Shifted, the negative twin: requests are noted as shorter than they are."""
    target, head = folders
    verify, rows = ChainedSteps.verify, []

    def noted(steps, inputs, *rest):
        lasts = verify(steps, inputs, *rest)
        rows.append(len(inputs.rows))
        steps._state.lengths -= shift
        return lasts

    monkeypatch.setattr(ChainedSteps, "verify", noted)
    with LLM(target, **COMMON) as llm:
        plain = texts(llm)
    config = {"method": method, "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    with LLM(
        target, **COMMON, speculative_config=config | ({"model": head} if method == "eagle3" else {})
    ) as llm:
        texts(llm)
        found = texts(llm)  # suffixes are known now
        values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    equal = sum(a == b for a, b in zip(found, plain, strict=True))
    assert (equal >= 9) != shift, f"{equal} of {len(PROMPTS)} texts are the same"
    assert len(rows) >= 3 and values["vllm:spec_decode_num_draft_tokens"] > 100
    if method == "suffix" and not shift:
        assert values["vllm:spec_decode_num_accepted_tokens"] > 100
