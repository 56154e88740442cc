"""New weights in an engine on a GPU: from files, from a trainer (IPC, NCCL); all of them, or none."""

import json

import httpx
import pytest
import torch
from safetensors.torch import load_file

from octavo import OctavoError, SamplingParams, WeightSender
from octavo.names.helpers import get_open_port
from tests.served_process import ServeProcess
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.gpu
PROMPT = list(range(2, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
FLAGS = ("--skip-tokenizer-init", "--dtype", "float32", "--num-gpu-blocks-override", "400", "--dev-mode")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture."""
    made = [make_oracle(tiny_config("LlamaForCausalLM"), seed) for seed in (0, 1)]
    return [save(oracle, tmp_path_factory.mktemp(f"seed{i}")) for i, oracle in enumerate(made)]


@pytest.fixture(scope="module")
def expected(folders):
    """The tokens of each."""
    from octavo import LLM

    found = []
    for folder in folders:
        with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=400) as llm:
            [output] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
            found.append(list(output.outputs[0].token_ids))
    assert found[0] != found[1]
    return found


def served(folder, backend):
    way = "--weight-transfer-config", json.dumps({"backend": backend})
    return ServeProcess(str(folder), *FLAGS, *way, program=["-m", "octavo", "serve"])


def tokens(server):
    body = {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def weights_of(folder, device):
    return {name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()}


def test_from_a_trainers_memory(folders, expected):
    """Another process on the same card; a tensor of the wrong shape changes nothing."""
    with served(folders[0], "ipc") as server:
        assert tokens(server) == expected[0]
        sender = WeightSender(server.url, "ipc", device="cuda:0", buffer_bytes=10_000)
        good = weights_of(folders[1], "cuda:0")
        name = "model.layers.1.mlp.down_proj.weight"
        with pytest.raises(OctavoError, match="expected shape"):
            sender.send(good | {name: good[name][:-1].clone()}, "never")
        assert tokens(server) == expected[0]
        sender.send(good, "step 1")
        assert tokens(server) == expected[1]
        assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "step 1"}
        sender.send(weights_of(folders[0], "cuda:0"), "step 2")
        assert tokens(server) == expected[0]
        sender.close()


def test_from_files(folders, make_llm, expected):
    llm = make_llm(folders[0])
    llm.update_weights_from_disk(str(folders[1]))
    [output] = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected[1]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a card for each rank")
def test_over_nccl(folders, expected):
    with served(folders[0], "nccl") as server:
        port = get_open_port()
        sender = WeightSender(server.url, "nccl", device="cuda:1", master_port=port, buffer_bytes=10_000)
        sender.send(weights_of(folders[1], "cuda:1"), "step 1")
        assert tokens(server) == expected[1]
        sender.close()
