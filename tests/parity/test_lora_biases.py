"""Trained biases of the base against PEFT's own forward, beside rows without them."""

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from octavo import LLM, PoolingParams
from octavo.lora.request import LoRARequest
from tests import peft_adapters
from tests.parity import test_lora_in_encoders as encoders
from tests.parity.test_lora import SCORED, check, engine, logits_of
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

KINDS = {
    "all": {"bias": "all", "target_modules": ["q_proj", "down_proj"]},
    "adapted": {"bias": "lora_only"},
    "dora": {"bias": "all", "use_dora": True, "target_modules": ["k_proj", "o_proj"]},
    "beside_its_own": {"bias": "lora_only", "lora_bias": True, "target_modules": ["v_proj", "up_proj"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["o_proj", "down_proj"]},
    "plain": {},
}
CONFIG = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The oracle, whose linear layers have biases, its checkpoint and the adapters."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | CONFIG)
    root = tmp_path_factory.mktemp("biases")
    adapters = {}
    for number, (kind, options) in enumerate(KINDS.items(), 1):
        model = peft_adapters.adapt(oracle, seed=number, **options)
        adapters[kind] = model, LoRARequest(kind, number, peft_adapters.save(model, root / kind))
    return oracle, save(oracle, root / "base"), adapters


@pytest.mark.parametrize("options", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)])
def test_each_kind_is_peft_s(made, options):
    oracle, folder, adapters = made
    rows = [*adapters.values(), (oracle, None)] * 2
    prompts = make_prompts(131, (9, 21, 40, 5, 17, 33, 12)) * 2
    llm = engine(folder, **options)
    outputs = llm.generate(prompts, SCORED, lora_request=[lora for _, lora in rows], use_tqdm=False)
    for output, found, (model, _) in zip(outputs, logits_of(outputs, 131), rows, strict=True):
        check(model, output, found)
    llm.shutdown()
    for (model, _), output, found in zip(adapters.values(), outputs, logits_of(outputs, 131), strict=False):
        has_own = has_base_s_biases(model := copy.deepcopy(model), oracle)
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        difference = (found - peft_adapters.logits(model, ids)).abs().max()
        assert difference > 0.05 if has_own else difference <= 1e-4, "biases show"


@torch.no_grad()
def has_base_s_biases(model, oracle) -> bool:
    """Give the base's biases to PEFT's model; returns whether it had its own."""
    own, changed = dict(oracle.named_parameters()), False
    for name, value in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        plain = plain.replace(".modules_to_save.default.", ".")
        if plain.endswith(".bias") and plain in own:
            changed |= not torch.equal(value, own[plain])
            value.copy_(own[plain])
    return changed


def test_norms_are_refused(tmp_path):
    """Of a model whose norms have biases; only those of layers are taken."""
    oracle = make_oracle(tiny_config("StableLmForCausalLM"))
    llm = engine(save(oracle, tmp_path / "base"))
    for number, (kind, text) in enumerate([("all", "norms stay the base's"), ("lora_only", None)], 1):
        model = peft_adapters.adapt(oracle, bias=kind, target_modules=["q_proj"])
        lora = LoRARequest(kind, number, peft_adapters.save(model, tmp_path / kind))
        (prompt,) = make_prompts(131, (20,))
        [output] = outputs = llm.generate([prompt], SCORED, lora_request=lora, use_tqdm=False)
        if text:
            assert text in output.outputs[0].error
        else:
            check(model, output, logits_of(outputs, 131)[0])


def test_projectors(tmp_path):
    """A whole projector beside an adapter of the text model, as LLaVA is trained; its layers have biases."""
    kinds = {
        "saved": {"target_modules": r".*language_model.*q_proj", "modules_to_save": ["multi_modal_projector"]}
    }
    encoders.try_images(encoders.LLAVA, tmp_path, kinds, ["saved", None, "saved"], (nn.Linear,))


def test_classifiers(tmp_path):
    """The head that PEFT saves has a bias."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = BertConfig(vocab_size=131, max_position_embeddings=128, num_labels=3, **sizes)
    oracle = BertForSequenceClassification(config).float().eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model = peft_adapters.adapt(oracle, seed=1, task_type="SEQ_CLS", target_modules=["query"])
    lora = LoRARequest("classes", 1, peft_adapters.save(model, tmp_path / "adapter"))
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    folder = str(save(oracle, tmp_path / "base"))
    llm = LLM(folder, enable_lora=True, skip_tokenizer_init=True, max_model_len=128, **exact)
    prompts, params = make_prompts(131, (20, 9, 33)), PoolingParams(task="classify", use_activation=False)
    outputs = llm.encode(prompts, params, lora_request=[lora, None, lora], use_tqdm=False)
    for output, prompt, wanted in zip(outputs, prompts, (model, oracle, model), strict=True):
        with torch.no_grad():
            logits = wanted(input_ids=torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.data.tolist()), logits, atol=1e-4, rtol=0)
