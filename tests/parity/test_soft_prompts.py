"""Learned prompts against PEFT: embeddings before the prompt, and keys and values."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, PromptAdapterRequest, RequestError, SamplingParams
from octavo.lora.request import LoRARequest
from octavo.runtime.worker.soft_prompts import SoftPromptsPart
from tests import handmade_adapters
from tests.parity.test_lora import SCORED, TOLERANCE, logits_of
from tests.peft_adapters import save as save_adapter
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

NUM_VIRTUAL, NUM_NEW = 21, 8
KINDS = {
    "prompt": peft.PromptTuningConfig,
    "p_tuning": peft.PromptEncoderConfig,
    "multitask": peft.MultitaskPromptTuningConfig,
    "prefix": peft.PrefixTuningConfig,
    "projected_prefix": peft.PrefixTuningConfig,
}
OPTIONS = {
    "p_tuning": {"encoder_hidden_size": 16},
    "multitask": {"num_tasks": 3},
    "projected_prefix": {"prefix_projection": True, "encoder_hidden_size": 16},
}
TASK = 2
PROMPTS = make_prompts(131, (40, 9))
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


def learn(oracle, kind, folder):
    """PEFT's model with random weights that show, and a request."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(list(KINDS).index(kind))
        config = KINDS[kind](task_type="CAUSAL_LM", num_virtual_tokens=NUM_VIRTUAL, **OPTIONS.get(kind, {}))
        made = peft.get_peft_model(oracle, config).eval()
        with torch.no_grad():
            for name, value in made.named_parameters():
                if value.requires_grad and "mlp_head" not in name and "transform" not in name:
                    value.copy_(torch.randn_like(value))
        save_adapter(made, folder)
        model = peft.PeftModel.from_pretrained(oracle, folder).eval()
    task = TASK if kind == "multitask" else 0
    return model, PromptAdapterRequest(kind, 1, str(folder), task_id=task)


@pytest.fixture(scope="module")
def learned(base, tmp_path_factory):
    return {
        kind: learn(make_oracle(tiny_config("LlamaForCausalLM")), kind, tmp_path_factory.mktemp(kind))
        for kind in KINDS
    }


def engine(folder, **options) -> LLM:
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    sizes = {"max_model_len": 256, "max_logprobs": -1, "logprobs_mode": "raw_logits"}
    options = {
        "enable_prompt_adapter": True,
        "num_gpu_blocks_override": 256,
        "skip_tokenizer_init": True,
    } | options
    return LLM(str(folder), seed=0, **exact | sizes | options)


@pytest.fixture(scope="module")
def llm(base):
    return engine(base[1])


def tasks(request):
    return {"task_ids": torch.tensor([TASK])} if request.prompt_adapter_name == "multitask" else {}


def logits(model, request, ids):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(input_ids=torch.tensor([ids]), **tasks(request)).logits[0, -len(ids) :].float()


def error_of(model, request, output):
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    (found,) = logits_of([output], 131)
    return float((found - logits(model, request, ids)).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_peft_s(base, learned, llm, kind):
    """Scores of the prompt and of new tokens; greedy text as PEFT generates it."""
    model, request = learned[kind]
    (output,) = llm.generate(PROMPTS[:1], SCORED, prompt_adapter_request=request, use_tqdm=False)
    assert output.prompt_token_ids == PROMPTS[0]
    assert error_of(model, request, output) <= TOLERANCE
    with torch.no_grad():
        plain = base[0](input_ids=torch.tensor(PROMPTS[:1])).logits[0]
    (found,) = logits_of([output], 131)
    assert (found[: len(PROMPTS[0])] - plain).abs().max() > 0.05, "it shows"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = model.generate(
            input_ids=torch.tensor(PROMPTS[:1]), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW,
            do_sample=False, pad_token_id=0, **tasks(request),
        )[0, -NUM_NEW:].tolist()  # fmt: skip
    (output,) = llm.generate(PROMPTS[:1], GREEDY, prompt_adapter_request=request, use_tqdm=False)
    assert output.outputs[0].token_ids == text


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"steps_in_flight": 2}]
)
def test_mixed_batches_in_chunks(base, learned, options):
    """All kinds and the base together; virtual tokens are cut by chunks."""
    llm = engine(base[1], **options)
    rows = [(prompt, request, model) for model, request in learned.values() for prompt in PROMPTS]
    rows += [(prompt, None, None) for prompt in PROMPTS]
    outputs = llm.generate(
        [prompt for prompt, *_ in rows],
        SCORED,
        prompt_adapter_request=[r for _, r, _ in rows],
        use_tqdm=False,
    )
    for output, (prompt, request, model) in zip(outputs, rows, strict=True):
        if model is not None:
            assert error_of(model, request, output) <= TOLERANCE
            continue
        ids = [*prompt, *output.outputs[0].token_ids][:-1]
        with torch.no_grad():
            plain = base[0](input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(logits_of([output], 131)[0], plain, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_prefix_cache_and_samples(learned, llm, kind):
    """Blocks are found again under the same prompt alone; n = 3 shares them."""
    _, request = learned[kind]
    params = SamplingParams(
        temperature=0.9, seed=5, n=3, max_tokens=NUM_NEW, repetition_penalty=1.3, ignore_eos=True
    )

    def run(wanted):
        (output,) = llm.generate(PROMPTS[:1], params, prompt_adapter_request=wanted, use_tqdm=False)
        return output.num_cached_tokens, [c.token_ids for c in output.outputs]

    llm.reset_prefix_cache()
    cold = run(request)
    assert cold[0] == 0 and len(set(map(tuple, cold[1]))) > 1
    assert run(None)[0] == 0
    warm = run(request)
    assert warm == ((NUM_VIRTUAL + len(PROMPTS[0])) // 16 * 16 - NUM_VIRTUAL, cold[1])
    small = [
        [c.token_ids for c in o.outputs]
        for o in llm.generate(PROMPTS, params, prompt_adapter_request=[None, request], use_tqdm=False)
    ]
    assert small[0] == run(None)[1]


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_preemption_and_sleep(base, learned, llm, kind):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True)
    prompts, request = make_prompts(131, (30, 31, 32, 33)), learned[kind][1]
    expected = [
        o.outputs[0].token_ids
        for o in llm.generate(prompts, params, prompt_adapter_request=request, use_tqdm=False)
    ]
    small = engine(base[1], num_gpu_blocks_override=14, max_model_len=128, swap_space=0.0)
    again = [
        o.outputs[0].token_ids
        for o in small.generate(prompts, params, prompt_adapter_request=request, use_tqdm=False)
    ]
    assert again == expected and small.llm_engine.core.stats.num_preemptions > 0
    llm.sleep(level=2)
    llm.wake_up()
    again = [
        o.outputs[0].token_ids
        for o in llm.generate(prompts, params, prompt_adapter_request=request, use_tqdm=False)
    ]
    assert again == expected


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_without_what_was_learned_it_is_not(base, learned, monkeypatch, kind):
    """The twin of the parity tests."""
    monkeypatch.setattr(SoftPromptsPart, "before", lambda *_: None)
    model, request = learned[kind]
    (output,) = engine(base[1]).generate(PROMPTS[:1], SCORED, prompt_adapter_request=request, use_tqdm=False)
    assert error_of(model, request, output) > 0.05


def test_other_layouts(tmp_path_factory):
    """Sliding windows, two cache groups, an 8-bit cache; PEFT's forward is the oracle."""
    config = tiny_config("Gemma3ForCausalLM")
    for kind in "prompt", "prefix":
        oracle = make_oracle(config)
        folder = save(oracle, tmp_path_factory.mktemp("gemma"))
        try:
            model, request = learn(oracle, kind, tmp_path_factory.mktemp(kind))
            expected = logits(model, request, PROMPTS[0])
        except (RuntimeError, ValueError):  # PEFT cannot, where heads are not of hidden_size / num_heads
            assert kind == "prefix"
            continue
        llm = engine(folder, max_num_batched_tokens=16, max_num_seqs=4)
        (output,) = llm.generate(PROMPTS[:1], SCORED, prompt_adapter_request=request, use_tqdm=False)
        found = logits_of([output], llm.llm_engine.config.checkpoint.vocab_size)[0][: len(PROMPTS[0])]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_ranks_share_a_prefix(base, learned):
    """tp = 2: each rank stores its heads."""
    llm = engine(base[1], tensor_parallel_size=2)
    for kind in "prefix", "prompt":
        model, request = learned[kind]
        (output,) = llm.generate(PROMPTS[:1], SCORED, prompt_adapter_request=request, use_tqdm=False)
        assert error_of(model, request, output) <= TOLERANCE
    llm.shutdown()


@pytest.mark.parametrize(
    ("kind", "is_displaced"),
    [
        ("prefix", False),
        *(pytest.param(k, d, marks=pytest.mark.slow) for k, d in (("prompt", False), ("prefix", True))),
    ],
)
def test_ranks_divide_the_tokens_of_a_prefix(tmp_path, kind, is_displaced):
    """dcp = 2: each rank stores the tokens that it keeps; wrong ones, and the logits are others."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"num_key_value_heads": 1})
    model, request = learn(oracle, kind, tmp_path / "prompt")
    sizes = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "max_num_batched_tokens": 16}
    backend = {"distributed_executor_backend": "tests.displaced_ranks:DisplacedExecutor"}
    llm = engine(
        save(oracle, tmp_path / "base"), max_num_seqs=4, **sizes, **(backend if is_displaced else {})
    )
    asked = [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    outputs = llm.generate(asked, SCORED, prompt_adapter_request=[request, None, request], use_tqdm=False)
    assert (error_of(model, request, outputs[0]) <= TOLERANCE) == (not is_displaced)
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_stages(base, learned, kind):
    """Each stage stores the heads of its layers; the first has the embeddings."""
    llm = engine(base[1], pipeline_parallel_size=2)
    model, request = learned[kind]
    outputs = llm.generate(PROMPTS, SCORED, prompt_adapter_request=[request, None], use_tqdm=False)
    assert error_of(model, request, outputs[0]) <= TOLERANCE
    llm.shutdown()


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_beside_an_adapter(base, kind, tmp_path):
    """As before the model with the adapter merged; each keeps its own blocks in the prefix cache."""
    merged = handmade_adapters.write(base[0], tmp_path / "lora", 4, seed=2)
    lora = LoRARequest("lora", 1, str(tmp_path / "lora"))
    model, request = learn(merged, kind, tmp_path / "prompt")
    llm = engine(base[1], enable_lora=True)
    asked = [(request, lora), (request, None), (None, lora), (request, lora)]
    outputs = llm.generate(
        [PROMPTS[0]] * 4,
        SCORED,
        prompt_adapter_request=[prompt for prompt, _ in asked],
        lora_request=[adapter for _, adapter in asked],
        use_tqdm=False,
    )
    errors = [error_of(model, request, output) for output in outputs]
    assert max(errors[0], errors[3]) <= TOLERANCE and min(errors[1], errors[2]) > 0.05


def test_what_cannot_be(base, learned, llm, tmp_path):
    source = Path(learned["prompt"][1].prompt_adapter_local_path)
    config = json.loads((source / "adapter_config.json").read_text())
    weights = load_file(source / "adapter_model.safetensors")["prompt_embeddings"]

    def refused(text, change=None, tensor=weights, **fields):
        save_file({"prompt_embeddings": tensor}, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | (change or {})))
        request = PromptAdapterRequest("x", 2, str(tmp_path), **fields)
        with pytest.raises(RequestError, match=text):
            llm.add_prompt_adapter(request)

    refused("is no learned prompt", {"peft_type": "LORA"})
    refused("must be a positive integer", {"num_virtual_tokens": 0})
    refused("must have 20 rows, found", {"num_virtual_tokens": 20})
    refused("is of another base", tensor=weights[:, :8].contiguous())
    refused("is of another base", {"peft_type": "PREFIX_TUNING"})
    refused("task_id must be below 1", task_id=1)
    refused("not finite", tensor=weights * float("nan"))
    with pytest.raises(RequestError, match="id must be > 0"):
        PromptAdapterRequest("x", 0, "y")
    with pytest.raises(RequestError, match="maximum context length"):
        llm.generate([[1] * 240], GREEDY, prompt_adapter_request=learned["prompt"][1], use_tqdm=False)
    bad = PromptAdapterRequest("x", 2, str(tmp_path))
    llm.generate(PROMPTS[:1], GREEDY, prompt_adapter_request=learned["prompt"][1], use_tqdm=False)
    (output, good) = llm.generate(PROMPTS, GREEDY, prompt_adapter_request=[bad, None], use_tqdm=False)
    assert "not finite" in output.outputs[0].error and good.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match="prompt adapters are not enabled"):
        engine(base[1], enable_prompt_adapter=False).generate(
            PROMPTS[:1], GREEDY, prompt_adapter_request=bad, use_tqdm=False
        )
