"""Snapshots on a GPU: the same tokens, with the kernels that the folder has."""

import shutil
import subprocess
import sys

import httpx
import pytest

from octavo import SamplingParams
from octavo.config.checkpoint import GPU_KERNELS
from tests.served_process import ServeProcess
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.gpu
PROMPT = list(range(2, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
FLAGS = ("--skip-tokenizer-init", "--num-gpu-blocks-override", "400")


def tokens(llm):
    [output] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_packed_weights(make_llm, tmp_path):
    """The folder keeps them as they were arranged for tensor cores."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    model = save(make_oracle(tiny_config("LlamaForCausalLM") | sizes), tmp_path / "model")
    kept, options = tmp_path / "kept", {"dtype": "bfloat16", "quantization": "int8"}
    llm = make_llm(model, **options)
    expected, [about] = tokens(llm), llm.collective_rpc("describe")
    command = [sys.executable, "-m", "octavo", "snapshot", str(model), str(kept), *FLAGS]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run(command, check=True, timeout=300)
    assert any("A8_32" in kind for kind in about["packed_matrices"])
    shutil.rmtree(model)
    llm = make_llm(kept, dtype="auto")
    assert tokens(llm) == expected
    [again] = llm.collective_rpc("describe")
    assert [again[name] for name in ("packed_matrices", "weight_bytes")] == [
        about[name] for name in ("packed_matrices", "weight_bytes")
    ]


def test_the_same_tokens(make_llm, tmp_path):
    """Here, and in a server, whose engine imports less of torch. float32: their steps have other shapes."""
    model, kept = save(make_oracle(tiny_config("LlamaForCausalLM")), tmp_path / "model"), tmp_path / "kept"
    expected = tokens(make_llm(model, dtype="float32"))
    command = [
        sys.executable,
        "-m",
        "octavo",
        "snapshot",
        str(model),
        str(kept),
        *FLAGS,
        "--dtype",
        "float32",
    ]
    subprocess.run(command, check=True, timeout=300)
    assert any((kept / GPU_KERNELS).iterdir())
    shutil.rmtree(model)  # nothing of it is needed
    assert tokens(make_llm(kept, dtype="auto")) == expected
    with ServeProcess(str(kept), *FLAGS, program=["-m", "octavo", "serve"]) as server:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120
        )
        assert answer.json()["choices"][0]["token_ids"] == expected, answer.text
