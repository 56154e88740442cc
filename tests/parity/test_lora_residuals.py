"""Adapters whose training began with a part of the base (PiSSA, OLoRA), against PEFT that loads them."""

import copy
import json
import warnings

import pytest
import torch
from peft import PeftModel

from octavo import LoRASum, RequestError
from octavo.lora.request import LoRARequest
from octavo.runtime.lora import reader
from tests import peft_adapters
from tests.parity.test_lora import SCORED, check, engine, logits_of
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

KINDS = {
    "pissa": {"init_lora_weights": "pissa", "r": 5},
    "olora": {"init_lora_weights": "olora", "r": 4, "use_rslora": True},
    "some": {"init_lora_weights": "pissa", "target_modules": ["k_proj", "up_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


def written(oracle, folder, **options):
    """Move the weights as training would; return the folder, and PEFT's model that has loaded it."""
    model = peft_adapters.adapt(oracle, scale=0.05, moves=True, **options)
    path = peft_adapters.save(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reads names that transformers deprecates
        return path, PeftModel.from_pretrained(copy.deepcopy(oracle), path).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_initial_parts_are_taken_from_the_base(base, tmp_path, kind, monkeypatch):
    path, model = written(base[0], tmp_path / "a", **KINDS[kind])
    (prompt,) = make_prompts(131, (40,))
    ask = {"lora_request": LoRARequest(kind, 1, path), "use_tqdm": False}
    outputs = engine(base[1]).generate([prompt], SCORED, **ask)
    check(model, outputs[0], logits_of(outputs, 131)[0])
    monkeypatch.setattr(reader, "_first_part", lambda m, _, rank, __: (m[:rank] * 0, m[:, :rank] * 0))
    outputs = engine(base[1]).generate([prompt], SCORED, **ask)
    gap = logits_of(outputs, 131)[0][:40] - peft_adapters.logits(model, prompt)
    assert gap.abs().max() > 0.05, "the twin: with the whole base the adapter is another one"


def test_what_cannot_be_known(base, tmp_path):
    path, _ = written(base[0], tmp_path / "a", **KINDS["pissa"])
    lora = LoRARequest("a", 1, path)
    with pytest.raises(RequestError, match="cannot be known of a quantized one"):
        engine(base[1], quantization="int8").llm_engine.add_lora(lora)
    llm = engine(base[1])
    output = llm.generate([[5, 6]], SCORED, lora_request=LoRASum(((lora, 0.5),)), use_tqdm=False)[0]
    assert "pissa cannot be scaled or added" in output.outputs[0].error
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"init_lora_weights": "pissa_niter_4"}))
    with pytest.raises(RequestError, match="by random numbers or by data"):
        llm.llm_engine.add_lora(lora)


def test_first_parts_of_matrices():
    """Tall, wide and square ones, against PEFT's own decompositions."""
    for shape in (24, 16), (16, 24), (16, 16):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        down, up = reader._first_part(matrix, "pissa", 3, 7.0)
        torch.testing.assert_close(up @ down, u[:, :3] * s[:3] @ v[:3], atol=1e-5, rtol=0)
        q, r = torch.linalg.qr(matrix)
        down, up = reader._first_part(matrix, "olora", 3, 7.0)
        torch.testing.assert_close(up @ down, 7 * q[:, :3] @ r[:3], atol=1e-5, rtol=0)
