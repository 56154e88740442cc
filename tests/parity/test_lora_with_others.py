"""Adapters and learned prompts with speculation, packed bases and host memory: the texts stay the same."""

import copy
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForSequenceClassification

from octavo import LLM, PoolingParams, RequestError, SamplingParams
from octavo.engine.speculation.step_costs import StepCosts
from octavo.engine.speculation.workers_drafting import WorkersDrafting
from octavo.lora.request import LoRARequest
from tests import handmade_adapters, peft_adapters, quantized_writers
from tests.parity.test_lora import SCORED, check, engine, logits_of
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=24, repetition_penalty=1.2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    root = tmp_path_factory.mktemp("lora")
    for name, rank in (("a", 3), ("b", 5)):
        handmade_adapters.write(oracle, root / name, rank, seed=rank)
    loras = [LoRARequest(name, i, str(root / name)) for i, name in enumerate("ab", 1)]
    return oracle, save(oracle, root / "base"), [*loras, None]


def texts(llm, loras):
    prompts = [[*prompt, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6] for prompt in make_prompts(131, (20, 40, 9))]
    found = []
    for params in PARAMS:
        outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        found.append([[c.token_ids for c in output.outputs] for output in outputs])
    return found


def test_speculation_changes_nothing(made, monkeypatch):
    """Drafts are verified with each request's own adapter."""
    monkeypatch.setattr(StepCosts, "of", lambda costs, rows, more: np.ones(more + 1))
    _, folder, loras = made
    expected = texts(engine(folder), loras)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    guessing = engine(folder, speculative_config=config)
    assert texts(guessing, loras) == expected
    stats = guessing.llm_engine.core.stats
    assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_draft_model_changes_nothing(made, monkeypatch, in_flight):
    """It guesses without adapters: right for requests that have none, and hardly ever for the others."""
    monkeypatch.setattr(StepCosts, "of", lambda costs, rows, more: np.ones(more + 1))
    monkeypatch.setattr(WorkersDrafting, "_best_count", lambda drafting, rows: drafting._wanted.most)
    _, folder, loras = made
    expected = texts(engine(folder), loras)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    guessing = engine(folder, speculative_config=config, steps_in_flight=in_flight)
    assert texts(guessing, loras) == expected
    stats = guessing.llm_engine.core.stats
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_host_memory(made):
    """Blocks that were swapped out come back to their own adapter's requests."""
    _, folder, loras = made
    expected = texts(engine(folder), loras)
    small = engine(folder, num_gpu_blocks_override=12, max_model_len=96, swap_space=0.01)
    assert texts(small, loras) == expected
    assert texts(small, [loras[1], loras[0], None]) != expected
    assert texts(small, loras) == expected
    assert small.llm_engine.core.stats.num_blocks_swapped_out > 0


@pytest.mark.parametrize("kind", ["int8", "gptq"])
def test_packed_bases(made, tmp_path, kind):
    """The adapter's change is that over the plain matrices, as far as packing lets one see."""
    oracle, plain, loras = made
    if kind == "int8":
        llm = engine(plain, quantization="int8")
    else:
        config = {"quant_method": "gptq", "bits": 8, "group_size": 16, "sym": True, "desc_act": False}
        write = partial(quantized_writers.gptq, bits=8, group=16, symmetric=True)
        choose = lambda name: None if name == "lm_head" else write  # noqa: E731
        packed = quantized_writers.write_checkpoint(copy.deepcopy(oracle), tmp_path, config, choose)
        llm = engine(packed)
    prompts = make_prompts(131, (20, 40, 9))
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, ignore_eos=True)

    def scores(engine, wanted):
        outputs = engine.generate(prompts, scored, lora_request=wanted, use_tqdm=False)
        return [
            np.array([row[i].logprob for row, i in zip(o.prompt_logprobs[1:], p[1:], strict=True)])
            for o, p in zip(outputs, prompts, strict=True)
        ]

    wanted, found = (scores(one, loras) for one in (engine(plain), llm))
    base = scores(llm, None)
    for change, packed, unchanged in zip(wanted[:2], found[:2], base[:2], strict=True):
        assert np.abs(packed - change).max() < 0.25 * np.abs(packed - unchanged).max(), "the adapter's own"
    assert (found[2] == base[2]).all(), "rows of the base have its bits"
    alone = llm.generate([prompts[0]], scored, lora_request=loras[0], use_tqdm=False)[0]
    row = np.array([r[i].logprob for r, i in zip(alone.prompt_logprobs[1:], prompts[0][1:], strict=True)])
    assert (row == found[0]).all(), "and those of an adapter its own, whatever the company"


@pytest.mark.slow
def test_stages(made, tmp_path):
    """Each stage has its layers of an adapter; one that a stage cannot read ends its requests alone."""
    oracle, folder, loras = made
    merged = [
        handmade_adapters.write(oracle, tmp_path / name, rank, seed=rank)
        for name, rank in (("a", 3), ("b", 5))
    ]
    llm = engine(folder, pipeline_parallel_size=2)
    prompts = make_prompts(131, (40, 9, 21))
    outputs = llm.generate(prompts, SCORED, lora_request=loras, use_tqdm=False)
    for output, found, model in zip(outputs, logits_of(outputs, 131), [*merged, oracle], strict=True):
        check(model, output, found)
    for layer, stage in ((0, "first"), (2, "last")):
        bad = tmp_path / stage
        shutil.copytree(tmp_path / "a", bad)
        tensors = load_file(bad / "adapter_model.safetensors")
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_A.weight"
        save_file(tensors | {name: tensors[name][:, :-1].clone()}, bad / "adapter_model.safetensors")
        wrong = LoRARequest(stage, 9, str(bad))
        outputs = llm.generate(prompts[:2], PARAMS[0], lora_request=[wrong, loras[1]], use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"], stage
        with pytest.raises(RequestError, match=r"lora_A has shape \[3, 47\]"):
            llm.add_lora(wrong)
    again = llm.generate(prompts, SCORED, lora_request=loras, use_tqdm=False)
    check(merged[0], again[0], logits_of(again, 131)[0])
    llm.shutdown()


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["word_embeddings", "query"]}, {"modules_to_save": ["word_embeddings"]}],
    ids=["adapted", "saved"],
)
def test_encoders(tmp_path, options):
    """Embeddings of whole texts, of which some have an adapter that begins where words are looked up."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    oracle = BertModel(BertConfig(vocab_size=131, max_position_embeddings=128, **sizes)).float().eval()
    kind = {"task_type": "FEATURE_EXTRACTION", "target_modules": ["query"]}
    model = peft_adapters.adapt(oracle, seed=1, **kind | options)
    lora = LoRARequest("words", 1, peft_adapters.save(model, tmp_path / "adapter"))
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    more = {"skip_tokenizer_init": True, "max_model_len": 128, "enable_lora": True, **exact}
    llm = LLM(str(save(oracle, tmp_path / "base")), runner="pooling", **more)
    prompts = make_prompts(131, (20, 9, 33))
    outputs = llm.embed(prompts, lora_request=[lora, None, lora], use_tqdm=False)
    found = torch.tensor([output.outputs.embedding for output in outputs])
    with torch.no_grad():
        firsts = [
            own(input_ids=torch.tensor([prompt])).last_hidden_state[0, 0]
            for own, prompt in zip((model, oracle, model), prompts, strict=True)
        ]
        other = oracle(input_ids=torch.tensor(prompts[:1])).last_hidden_state[0, 0]
    wanted = torch.nn.functional.normalize(torch.stack(firsts), dim=1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert (found[0] - torch.nn.functional.normalize(other, dim=0)).abs().max() > 0.05, "the adapter shows"


def test_classifiers(tmp_path):
    """The head that PEFT saves beside an adapter takes the place of the base's, for its own requests."""
    config = {name: v for name, v in tiny_config("LlamaForCausalLM").items() if name != "architectures"}
    torch.manual_seed(0)
    oracle = (
        LlamaForSequenceClassification(LlamaConfig(**config, num_labels=3, pad_token_id=0)).float().eval()
    )
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(0, 0.1)
    model = peft_adapters.adapt(oracle, seed=1, task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"])
    lora = LoRARequest("classes", 1, peft_adapters.save(model, tmp_path / "adapter"))
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    llm = LLM(
        str(save(oracle, tmp_path / "base")),
        enable_lora=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        **exact,
    )
    prompts, params = make_prompts(131, (20, 9, 33)), PoolingParams(task="classify", use_activation=False)
    outputs = llm.encode(prompts, params, lora_request=[lora, None, lora], use_tqdm=False)
    for output, prompt, wanted in zip(outputs, prompts, (model, oracle, model), strict=True):
        with torch.no_grad():
            logits = wanted(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))
            ).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.data.tolist()), logits, atol=1e-4, rtol=0)
