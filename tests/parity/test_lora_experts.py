"""Adapters inside experts: PEFT's stacks (`target_parameters`), and modules of single experts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import RequestError
from octavo.lora.request import LoRARequest
from octavo.runtime.kernels.adapters import LowRank
from octavo.runtime.lora.sites import Reach
from octavo.runtime.worker.recorded_calls import RecordedCalls
from tests import peft_adapters
from tests.parity.test_lora import SCORED, check, engine, logits_of
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = {
    "Qwen3MoeForCausalLM": STACKS,
    "MixtralForCausalLM": STACKS,
    "GptOssForCausalLM": STACKS,
    "OlmoeForCausalLM": STACKS[:1],
}


def made(oracle, folder, targets, **options):
    """PEFT's model, and a request for what it saves."""
    given = {"target_modules": ["q_proj"], "target_parameters": targets, "r": 3} | options
    model = peft_adapters.adapt(oracle, **given)
    return model, peft_adapters.save(model, folder)


def answers(llm, prompts, loras):
    outputs = llm.generate(prompts, SCORED, lora_request=loras, use_tqdm=False)
    return outputs, logits_of(outputs, 131)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_stacks_are_peft_s(tmp_path, architecture):
    """Beside an adapter of attention and rows of the base, which keep their bits."""
    oracle = make_oracle(tiny_config(architecture))
    model, path = made(oracle, tmp_path / "stacks", FAMILIES[architecture])
    other = peft_adapters.adapt(oracle, seed=5, target_modules=["v_proj"])
    loras = [LoRARequest("a", 1, path), LoRARequest("b", 2, peft_adapters.save(other, tmp_path / "b")), None]
    llm = engine(save(oracle, tmp_path / "base"))
    prompts = make_prompts(131, (21, 9, 14))
    outputs, found = answers(llm, prompts, loras)
    for output, logits, wanted in zip(outputs, found, (model, other, oracle), strict=True):
        check(wanted, output, logits)
    assert (found[0][:21] - peft_adapters.logits(oracle, prompts[0])).abs().max() > 0.05
    for index in range(3):
        llm.reset_prefix_cache()
        _, (alone,) = answers(llm, prompts[index : index + 1], loras[index])
        assert torch.equal(alone, found[index])


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_steps_are_recorded(tmp_path, monkeypatch, architecture):
    """Every step of one token is replayed, and gives the bits of the model's own steps."""
    oracle = make_oracle(tiny_config(architecture))
    _, path = made(oracle, tmp_path / "stacks", STACKS)
    folder, prompts = save(oracle, tmp_path / "base"), make_prompts(131, (21, 9, 14))
    loras, found, seen = [LoRARequest("a", 1, path), None, LoRARequest("b", 2, path)], [], []
    replay = RecordedCalls._replay

    def noted(calls, work, shape):
        seen.append(shape.reach)
        return replay(calls, work, shape)

    monkeypatch.setattr(RecordedCalls, "_replay", noted)
    for options in {"enforce_eager": True}, {}:
        _, logits = answers(engine(folder, **options), prompts, loras)
        found.append(logits)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert seen == [Reach.EXPERTS] * 3


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A model with experts, PEFT's adapter of their stacks, and its folder."""
    oracle = make_oracle(tiny_config("Qwen3MoeForCausalLM"))
    folder = tmp_path_factory.mktemp("qwen")
    return save(oracle, folder / "base"), *made(oracle, folder / "stacks", STACKS, target_modules=[])


def apart(path, folder, most=99):
    """Write an adapter's stacks as modules of single experts, as older versions had them; of the first."""
    folder.mkdir()
    config = json.loads(Path(path, "adapter_config.json").read_text()) | {"target_parameters": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found, rank, tensors = load_file(f"{path}/adapter_model.safetensors"), config["r"], {}
    for name, down in found.items():
        if not name.endswith("lora_A.weight"):
            continue
        stem, up = name.removesuffix(".lora_A.weight"), found[name.replace("lora_A", "lora_B")]
        downs, ups = down.split(rank), up.view(len(up), rank, -1).unbind(-1)
        for expert, (a, b) in enumerate(list(zip(downs, ups, strict=True))[:most]):
            is_up = b.shape[0] != 48
            names = ("gate_proj", "up_proj") if is_up else ("down_proj",)
            for part, rows in zip(names, b.chunk(len(names)), strict=True):
                module = f"{stem.removesuffix('.base_layer')}.{expert}.{part}"
                tensors[f"{module}.lora_A.weight"] = a.clone()
                tensors[f"{module}.lora_B.weight"] = rows.clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"max_num_batched_tokens": 16}])
def test_single_experts_two_ranks_and_chunks(qwen, tmp_path, options):
    folder, model, path = qwen
    loras = [LoRARequest("stacks", 1, path), LoRARequest("apart", 2, apart(path, tmp_path / "apart"))]
    prompts = make_prompts(131, (21, 21))
    outputs, found = answers(engine(folder, **options), prompts, loras)
    for output, logits in zip(outputs, found, strict=True):
        check(model, output, logits)


def test_each_rank_keeps_its_own_experts(qwen, tmp_path):
    """Two ranks with four experts each say what one process says, rows of the base too, in any company."""
    folder, model, path = qwen
    half = apart(path, tmp_path / "half", most=4)  # changes experts of the first rank alone
    loras = [LoRARequest("stacks", 1, path), None, LoRARequest("half", 2, half)]
    prompts = make_prompts(131, (21, 14, 21))
    _, wanted = answers(engine(folder), prompts, loras)
    llm = engine(folder, tensor_parallel_size=2, enable_expert_parallel=True)
    outputs, found = answers(llm, prompts, loras)
    check(model, outputs[0], found[0])
    for ours, alone in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, alone, atol=1e-4, rtol=0)
    assert (wanted[0][:21] - wanted[2][:21]).abs().max() > 0.01, "the other rank's experts show"
    for index in range(3):
        llm.reset_prefix_cache()
        _, (alone,) = answers(llm, prompts[index : index + 1], loras[index])
        assert torch.equal(alone, found[index])


def test_a_quantized_base(qwen):
    """Changes are added to what packed experts give."""
    folder, model, path = qwen
    (prompt,) = make_prompts(131, (21,))
    _, (found, plain) = answers(
        engine(folder, quantization="int8"), [prompt] * 2, [LoRARequest("a", 1, path), None]
    )
    wanted = peft_adapters.logits(model, prompt)
    assert (found[:21] - wanted).abs().max() < 0.3 * (plain[:21] - wanted).abs().max()


def test_others_experts_show(qwen, monkeypatch):
    """The twin: each expert with the change of the next one."""
    folder, model, path = qwen
    entries = LowRank.entries
    monkeypatch.setattr(LowRank, "entries", lambda change: np.roll(entries(change), -1, 0))
    (prompt,) = make_prompts(131, (21,))
    _, (found,) = answers(engine(folder), [prompt], LoRARequest("a", 1, path))
    assert (found[:21] - peft_adapters.logits(model, prompt)).abs().max() > 0.01


def test_wrong_shapes(qwen, tmp_path):
    folder, _, path = qwen
    found = load_file(f"{path}/adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(Path(path, "adapter_config.json").read_text())
    save_file({n: t[..., :-1].contiguous() for n, t in found.items()}, tmp_path / "adapter_model.safetensors")
    llm = engine(folder)
    with pytest.raises(RequestError, match=r"no such matrix|of another base"):
        llm.llm_engine.add_lora(LoRARequest("bad", 9, str(tmp_path)))
