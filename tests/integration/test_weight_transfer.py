"""A trainer's weights in a running engine, over gloo and shared memory: all of them, or nothing changes."""

import asyncio
import copy
import os
import signal

import httpx
import pytest
import torch
from safetensors.torch import load_file

from octavo import AsyncLLM, EngineArgs, OctavoError, RequestError, SamplingParams, Unsupported, WeightSender
from octavo.config import resolve
from octavo.config.server import ServerConfig
from octavo.frontend.client.restart import RestartPolicy
from octavo.messages.sampling import RequestOutputKind
from octavo.names.helpers import get_open_port
from octavo.serving.app import make_app
from tests.tiny_models import make_oracle, save, tiny_config

PROMPTS = [[i + 1] * (20 + i) for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


def tokens(llm):
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"), seed=1)
    return save(oracle, tmp_path_factory.mktemp("other"))


@pytest.fixture
def sender_for():
    senders = []

    def make(engine, backend, num_ranks=1, **options):
        options |= {"master_port": get_open_port(), "world_size": 1 + num_ranks}
        senders.append(WeightSender(engine, backend, **options))
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()


@pytest.mark.parametrize(
    ("backend", "num_ranks", "options"),
    [
        ("nccl", 1, {}),
        pytest.param("nccl", 2, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        ("ipc", 1, {}),
        pytest.param("ipc", 2, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("nccl", 1, {"quantization": "int8_per_channel_weight_only"}, marks=pytest.mark.slow),
    ],
)
def test_outputs_are_those_of_an_engine_with_these_weights(
    backend, num_ranks, options, tiny_llama, other, make_llm, sender_for
):
    """Several updates over one connection, in buffers of few tensors; cached prompts are not used again."""
    way = {"weight_transfer_config": {"backend": backend}}
    expected, llm = tokens(make_llm(other, **options)), make_llm(tiny_llama, **options, **way)
    before = tokens(llm)
    sender = sender_for(llm, backend, num_ranks, buffer_bytes=10_000)
    sender.send(load_file(other / "model.safetensors"), "step 1")
    assert tokens(llm) == expected != before and llm.get_weight_version() == "step 1"
    sender.send(load_file(tiny_llama / "model.safetensors"), "step 2")
    assert tokens(llm) == before and llm.get_weight_version() == "step 2"
    llm.update_weight_version("step 3")
    assert llm.get_weight_version() == "step 3"


@pytest.mark.matrix
@pytest.mark.parametrize(("backend", "num_ranks"), [("nccl", 1), ("nccl", 2), ("ipc", 2)])
def test_nothing_changes_when_a_rank_cannot_use_a_tensor(
    backend, num_ranks, tiny_llama, other, make_llm, sender_for
):
    """The others take what is broadcast meanwhile, so the connection is good for the next update."""
    way = {"weight_transfer_config": {"backend": backend}, "tensor_parallel_size": num_ranks}
    llm = make_llm(tiny_llama, **way)
    before, good = tokens(llm), load_file(other / "model.safetensors")
    sender = sender_for(llm, backend, num_ranks, buffer_bytes=10_000)
    name = "model.layers.1.mlp.down_proj.weight"
    for wrong, reason in [
        ({k: v for k, v in good.items() if k != name}, "lacks 1 weights"),
        (good | {name: good[name][:-1].clone()}, "expected shape"),
        ({"model.nothing.weight": good[name]} | good, "is not known to"),
        (good | {name: good[name].to(torch.int32)}, "is torch.int32"),
    ]:
        with pytest.raises(OctavoError, match=reason):
            sender.send(wrong, "never")
        assert tokens(llm) == before and llm.get_weight_version() == "default"
    sender.send(good, "step 1")
    assert tokens(llm) != before and llm.get_weight_version() == "step 1"


def test_the_order_of_verbs_and_what_they_are_given(tiny_llama, make_llm):
    llm = make_llm(tiny_llama, weight_transfer_config={"backend": "ipc"})
    with pytest.raises(RequestError, match="needs init_info"):
        llm.init_weight_transfer_engine({})
    llm.init_weight_transfer_engine({"init_info": {}})
    for too_early in (
        lambda: llm.update_weights({"update_info": {"names": [], "dtype_names": [], "shapes": []}}),
        llm.finish_weight_update,
    ):
        with pytest.raises(OctavoError, match="start_weight_update comes before"):
            too_early()
    for info, reason in [
        ({"names": ["a"], "dtype_names": [], "shapes": [[1]]}, "should be of the same size"),
        ({"names": ["a"], "dtype_names": ["load"], "shapes": [[1]]}, "no type of torch"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}, "not a list of sizes"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}, "ipc_handles must be"),
        (
            {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles": {"cpu": "/nowhere"}},
            "cannot be opened",
        ),
    ]:
        llm.start_weight_update()
        with pytest.raises(OctavoError, match=reason):
            llm.update_weights({"update_info": info})
    llm.start_weight_update()
    with pytest.raises(OctavoError, match="lacks"):
        llm.finish_weight_update("never")
    assert tokens(llm) and llm.get_weight_version() == "default"
    with pytest.raises(OctavoError, match="Weight transfer not configured"):
        make_llm(tiny_llama).init_weight_transfer_engine({"init_info": {}})
    with pytest.raises(Unsupported, match="backend='sharded_rdt' is not supported"):
        make_llm(tiny_llama, weight_transfer_config={"backend": "sharded_rdt"}).start_weight_update()


def test_answers_say_which_tokens_are_by_which_weights(tiny_llama, other, make_llm, sender_for):
    llm = make_llm(tiny_llama, weight_transfer_config={"backend": "ipc"})
    llm.enqueue(PROMPTS, GREEDY)
    for _ in range(5):
        llm.llm_engine.step()
    sender_for(llm, "ipc").send(load_file(other / "model.safetensors"), "step 1")
    for output in llm.wait_for_completion(use_tqdm=False):
        first, second = output.outputs[0].weight_versions
        assert (first.version, second.version) == ("default", "step 1")
        assert 0 == first.start < first.end == second.start < second.end == GREEDY.max_tokens


class Routes:
    """The verbs of a server as calls, for a thread beside its event loop."""

    def __init__(self, client):
        self._client, self._loop = client, asyncio.get_running_loop()

    def __getattr__(self, verb):
        def call(body=None):
            given = {"weight_version": body} if verb == "finish_weight_update" else body or {}
            return asyncio.run_coroutine_threadsafe(self._post(verb, given), self._loop).result(60)

        return call

    async def _post(self, verb, body):
        answer = await self._client.post(f"/{verb}", json=body)
        assert answer.status_code == 200 and answer.json()["message"], answer.text


@pytest.mark.matrix
@pytest.mark.parametrize("keeps", [True, False])
async def test_after_a_crash(keeps, tiny_llama, other, make_llm, sender_for, tmp_path, monkeypatch, caplog):
    """With a folder to keep them in, open requests go on by the same weights; else the log says so."""
    monkeypatch.setattr(RestartPolicy, "delay_s", lambda policy: 0.0)
    expected = tokens(make_llm(other if keeps else tiny_llama))
    way = {"backend": "nccl"} | ({"keep_in": str(tmp_path)} if keeps else {})
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 400}
    engine = AsyncLLM(
        resolve(EngineArgs(model=str(tiny_llama), weight_transfer_config=way, **options)), on_crash="replay"
    )
    await engine.start()
    transport = httpx.ASGITransport(make_app(engine, ServerConfig(dev_mode=True)))
    async with httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=60) as client:
        sender = await asyncio.to_thread(sender_for, Routes(client), "nccl")
        for number, folder in (1, tiny_llama), (2, other):
            weights = load_file(folder / "model.safetensors")
            await asyncio.to_thread(sender.send, weights, f"step {number}")
        assert (await client.get("/weight_info")).json() == {"weight_version": "step 2"}
        assert len(list(tmp_path.iterdir())) == keeps
        body = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
        assert choice["weight_versions"] == [{"version": "step 2", "start": 0, "end": 4}]
        found, params = [], copy.copy(GREEDY)
        params.output_kind = RequestOutputKind.DELTA
        async for output in engine.generate(PROMPTS[0], params):
            if not found:
                os.kill(engine.core.client._core.pid, signal.SIGKILL)
            found += output.outputs[0].token_ids
        again = [output async for output in engine.generate(PROMPTS[1], GREEDY)][-1].outputs[0]
        assert list(again.token_ids) == expected[1]
        if keeps:
            assert found == expected[0]
        assert ("are lost with the engine" in caplog.text) is not keeps
        version = (await client.get("/get_weight_version")).json()["weight_version"]
        assert version == ("step 2" if keeps else "default")
    await engine.shutdown()
