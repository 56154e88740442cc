"""Adapters over HTTP: names, sums, loading while the server runs, the folder, metrics. A tiny model."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager

import httpx
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from octavo import AsyncLLM, EngineArgs
from octavo.base.errors import ConfigError
from octavo.config.server import ServerConfig
from octavo.serving.app import make_app
from tests import handmade_adapters
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

pytestmark = pytest.mark.asyncio(loop_scope="module")
(PROMPT,) = make_prompts(131, (12,))
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, and a folder of adapters with the models that they are merged into."""
    root = tmp_path_factory.mktemp("lora")
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"tie_word_embeddings": False})
    merged = {
        name: handmade_adapters.write(oracle, root / "adapters" / name, rank, seed=rank)
        for name, rank in (("red", 4), ("blue", 3), ("green", 2))
    }
    return save(oracle, root / "base"), root / "adapters", {"base": oracle} | merged


@asynccontextmanager
async def serving(made, **options):
    base, folder, _ = made
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    args = EngineArgs(
        model=str(base), enable_lora=True, enable_prompt_adapter=True, max_loras=2, max_model_len=256,
        num_gpu_blocks_override=64,
        served_model_name=["base"], skip_tokenizer_init=True, seed=0, **exact,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(args)
    await engine.start()
    options = {"lora_folder": str(folder), "allow_runtime_lora_updating": True} | options
    app = make_app(engine, ServerConfig(**options))
    await app.state.engines.adapters.load_modules()
    batches = asyncio.create_task(app.state.batch_runner.run())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo", timeout=60) as client:
            client.app = app
            yield client
    finally:
        batches.cancel()
        await engine.shutdown()
        await app.state.store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(made):
    module = {"name": "red", "path": str(made[1] / "red"), "base_model_name": "the-parent"}
    async with serving(made, lora_modules=[json.dumps(module)]) as running:
        yield running


def greedy(model, ids, count=NUM_TOKENS):
    ids = list(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


async def post(client, path, status=200, **body):
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer


async def completed(client, model="base", **fields):
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    fields = body | {"return_token_ids": True, "detokenize": False} | fields
    fields.pop("detokenize")
    answer = (await post(client, "/v1/completions", model=model, **fields)).json()
    assert answer["model"] == model
    return answer["choices"][0]["token_ids"]


async def test_each_name_is_its_adapter_s(client, made):
    """Those of --lora-modules, those of the folder when they are asked for first, and the base."""
    names = ["base", "red", "blue", "green", "red"]
    found = await asyncio.gather(*(completed(client, name) for name in names))
    expected = [greedy(made[2][name], PROMPT) for name in names]
    assert found == expected
    assert len(set(map(tuple, expected))) == 4, "they differ"
    listed = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    assert list(listed)[:2] == ["base", "red"] and set(listed) == {"base", "red", "blue", "green"}
    assert listed["red"]["parent"] == "the-parent" and listed["blue"]["parent"] == "base"
    assert listed["red"]["root"] == str(made[1] / "red") and listed["base"]["parent"] is None
    assert (await client.get("/v1/models/blue")).json() == listed["blue"]
    error = await post(client, "/v1/completions", 404, model="yellow", prompt=PROMPT)
    assert "'yellow' does not exist" in error.text
    for outside in ("../base", "/etc", ".", "red/../../base", "red\0", "blue/../red", "./red", "red//"):
        await post(client, "/v1/completions", 404, model=outside, prompt=PROMPT)


async def test_sums(client, made):
    """Each adapter times its scale, by names or by places; a list without any is the base."""
    summed = {name: value.clone() for name, value in made[2]["base"].state_dict().items()}
    for name, scale in (("red", 0.5), ("blue", 1.5)):
        for key, value in made[2][name].state_dict().items():
            summed[key] += scale * (value - made[2]["base"].state_dict()[key])
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"tie_word_embeddings": False})
    oracle.load_state_dict(summed)
    lora = [{"name": "red", "scale": 0.5}, {"name": "blue", "scale": 1.5}]
    expected = greedy(oracle, PROMPT)
    assert await completed(client, lora=lora) == expected
    places = [card["id"] for card in (await client.get("/v1/models")).json()["data"]][1:]
    by_place = [{"id": places.index(entry["name"]), "scale": entry["scale"]} for entry in lora]
    assert await completed(client, lora=by_place) == expected
    base = greedy(made[2]["base"], PROMPT)
    assert await completed(client, lora=[]) == base != expected
    assert await completed(client, lora=[{"name": "red", "scale": 0}]) == base
    for wrong, status in (
        ([{"name": "no"}], 404),
        ([{"id": 99}], 404),
        ([{}], 400),
        ([{"name": "red", "id": 0}], 400),
        ([{"name": "red", "scale": 1e9}], 400),
        ([{"name": "red", "color": 1}], 400),
        ([{"name": "red"}] * 17, 400),
    ):
        await post(client, "/v1/completions", status, model="base", prompt=PROMPT, lora=wrong)
    refused = await post(client, "/v1/completions", 400, model="red", prompt=PROMPT, lora=lora)
    assert "not to the adapter 'red'" in refused.text


async def test_learned_prompts_have_names_too(client, made):
    """One of prompt tuning: virtual tokens before the prompt, which nobody counts."""
    oracle, folder = made[2]["base"], made[1] / "learned"
    folder.mkdir()
    embeds = torch.randn(5, 48, generator=torch.Generator().manual_seed(3))
    save_file({"prompt_embeddings": embeds}, folder / "adapter_model.safetensors")
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5, "token_dim": 48}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        embedded = torch.cat([embeds, oracle.get_input_embeddings()(torch.tensor(ids))])
        with torch.no_grad():
            ids.append(int(oracle(inputs_embeds=embedded[None]).logits[0, -1].argmax()))
    found = await completed(client, "learned")
    assert found == ids[-NUM_TOKENS:] != greedy(oracle, PROMPT)
    usage = (await post(client, "/v1/completions", model="learned", prompt=PROMPT)).json()["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    lora = [{"name": "red", "scale": 1.0}]
    both = (
        await post(client, "/v1/completions", model="learned", prompt=PROMPT, lora=lora, ignore_eos=True)
    ).json()
    assert both["choices"][0]["finish_reason"] == "length"
    scaled = [{"name": "learned", "scale": 0.5}]
    refused = await post(client, "/v1/completions", 400, model="base", prompt=PROMPT, lora=scaled)
    assert "A sum takes adapters" in refused.text
    await post(client, "/v1/unload_lora_adapter", lora_name="learned")
    shutil.rmtree(folder)
    await post(client, "/v1/completions", 404, model="learned", prompt=PROMPT)


async def test_load_and_unload(client, made):
    """vLLM's texts; a name that is taken, taken over, taken away."""
    error = (await post(client, "/v1/load_lora_adapter", 400, lora_name="a")).json()["error"]
    assert error["message"] == "Both 'lora_name' and 'lora_path' must be provided."
    assert error["type"] == "InvalidUserInput"
    answer = await post(client, "/v1/load_lora_adapter", lora_name="mine", lora_path="blue")
    assert answer.text == "Success: LoRA adapter 'mine' added successfully."
    assert await completed(client, "mine") == greedy(made[2]["blue"], PROMPT)
    again = await post(client, "/v1/load_lora_adapter", 400, lora_name="mine", lora_path="green")
    assert again.json()["error"]["message"] == (
        "The lora adapter 'mine' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True."
    )
    path = str(made[1] / "green")
    await post(client, "/v1/load_lora_adapter", lora_name="mine", lora_path=path, load_inplace=True)
    assert await completed(client, "mine") == greedy(made[2]["green"], PROMPT), (
        "and no cached prompt of blue's"
    )
    answer = await post(client, "/v1/unload_lora_adapter", lora_name="mine")
    assert answer.text == "Success: LoRA adapter 'mine' removed successfully."
    await post(client, "/v1/completions", 404, model="mine", prompt=PROMPT)
    gone = await post(client, "/v1/unload_lora_adapter", 404, lora_name="mine")
    assert gone.json()["error"]["message"] == "The lora adapter 'mine' cannot be found."
    nameless = await post(client, "/v1/unload_lora_adapter", 400)
    assert "'lora_name' needs to be provided" in nameless.text
    taken = await post(client, "/v1/load_lora_adapter", 400, lora_name="base", lora_path="red")
    assert "'base' conflicts with a served base model." in taken.text


async def test_bad_adapters_disturb_nobody(client, made, tmp_path):
    folder = made[1]
    shutil.copytree(folder / "red", tmp_path / "outside")
    link, wrong = folder / f"link-{tmp_path.name}", folder / f"wrong-{tmp_path.name}"
    link.symlink_to(tmp_path / "outside")
    shutil.copytree(folder / "red", wrong)
    config = json.loads((wrong / "adapter_config.json").read_text())
    running = asyncio.create_task(completed(client, "red", max_tokens=100))

    async def refused(text, path=wrong.name):
        answer = await post(client, "/v1/load_lora_adapter", 400, lora_name="wrong", lora_path=path)
        assert text in answer.json()["error"]["message"], answer.text

    for outside in (str(tmp_path / "outside"), "../outside", link.name, ".", "/"):
        await refused("must lie in the server's --lora-folder", outside)
    await refused("No adapter found", "nothing")
    for change, text in (
        ({"r": 0}, "r must be a positive integer"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"peft_type": "VERA"}, "peft_type 'VERA' is not supported"),
        ({"use_qalora": True}, "QALoRA"),
    ):
        (wrong / "adapter_config.json").write_text(json.dumps(config | change))
        await refused(text)
    (wrong / "adapter_config.json").write_text(json.dumps(config))
    handmade = wrong / "adapter_model.safetensors"
    handmade.rename(wrong / "adapter_model.bin")
    await refused("pickle file")
    handmade.write_bytes(b"no safetensors at all")
    await refused("is no safetensors file")
    other = make_oracle(
        tiny_config("LlamaForCausalLM") | {"hidden_size": 24, "head_dim": 16, "tie_word_embeddings": False}
    )
    shutil.rmtree(folder / "other", ignore_errors=True)
    handmade_adapters.write(other, folder / "other", 4, seed=1)
    await refused("the adapter is of another base", "other")
    await refused("_proj.lora_", "other")
    shutil.rmtree(folder / "nan", ignore_errors=True)
    handmade_adapters.write(made[2]["base"], folder / "nan", 4, seed=1, factor=float("nan"))
    await refused("not finite numbers", "nan")
    assert await running == greedy(made[2]["red"], PROMPT, 100)
    assert "wrong" not in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}


async def test_a_broken_folder_asked_for_by_name_is_refused(client, made):
    """The reason is told, no name is listed, and once mended it is loaded, by many at once, in sums too."""
    folder, asked = made[1] / "mended", {"model": "mended", "prompt": PROMPT}
    handmade_adapters.write(made[2]["base"], folder, 4, seed=9, factor=float("nan"))
    for body in [asked] * 3 + [{"prompt": PROMPT, "lora": [{"name": "mended"}]}]:
        error = (await post(client, "/v1/completions", 400, **body)).json()["error"]
        assert error["message"].startswith("LoRA adapter 'mended' was found but could not be loaded.")
        assert "not finite numbers" in error["message"] and error["param"] == "model"
    assert "mended" not in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}
    assert (await client.get("/v1/models/mended")).status_code == 404
    shutil.rmtree(folder)
    expected = greedy(handmade_adapters.write(made[2]["base"], folder, 4, seed=9), PROMPT)
    found = await asyncio.gather(*(completed(client, "mended") for _ in range(4)))
    assert found == [expected] * 4 and expected != greedy(made[2]["base"], PROMPT)
    await client.app.state.engines.adapters.unload("mended")
    assert await completed(client, lora=[{"name": "mended"}]) == expected


async def test_unloading_waits_or_is_refused(client, made):
    """The request waits for the engine, which stands still until all has been looked at, and counts."""
    await post(client, "/v1/load_lora_adapter", lora_name="used", lora_path="blue")
    engine, path = client.app.state.engines.of(), str(made[1] / "blue")
    await engine.pause_generation("keep")
    running = asyncio.create_task(completed(client, "used", max_tokens=200))
    while not await engine.num_lora_users(path):
        await asyncio.sleep(0.01)
    refused = await post(client, "/v1/unload_lora_adapter", 409, lora_name="used", wait_s=0)
    assert "is in use by 1 requests" in refused.text
    unloading = asyncio.create_task(post(client, "/v1/unload_lora_adapter", lora_name="used"))
    while "used" in {card["id"] for card in (await client.get("/v1/models")).json()["data"]}:
        await asyncio.sleep(0.01)
    await post(client, "/v1/completions", 404, model="used", prompt=PROMPT)
    assert not unloading.done() and not running.done()
    await engine.resume_generation()
    assert await running == greedy(made[2]["blue"], PROMPT, 200)
    await unloading


async def test_metrics(client):
    await completed(client, "red")
    page = (await client.get("/metrics")).text
    counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("vllm:lora_"))
    series = {name.partition("{")[0]: float(value) for name, value in counts.items()}
    assert series["vllm:lora_loads_total"] >= 1 and series["vllm:lora_hits_total"] >= 1
    (info,) = [name for name in counts if name.startswith("vllm:lora_requests_info")]
    assert 'max_lora="2"' in info and 'running_lora_adapters=""' in info
    running = asyncio.create_task(completed(client, "red", max_tokens=200))
    seen = ""
    while not running.done() and 'running_lora_adapters="red"' not in seen:
        seen = (await client.get("/metrics")).text
    await running
    assert 'running_lora_adapters="red"' in seen


async def test_batches_name_adapters(client, made):
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions",
         "body": {"model": name, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0,
                  "ignore_eos": True, "return_token_ids": True}}
        for name in ("red", "green", "base")
    ]  # fmt: skip
    file = ("in.jsonl", "\n".join(map(json.dumps, rows)).encode())
    given = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": file})
    body = {"input_file_id": given.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await post(client, "/v1/batches", **body)).json()
    while batch["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.05)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    lines = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
    for line in map(json.loads, lines):
        ids = line["response"]["body"]["choices"][0]["token_ids"]
        assert ids == greedy(made[2][line["custom_id"]], PROMPT)
    assert len(lines) == len(rows)


async def test_what_was_not_allowed(made):
    async with serving(made, allow_runtime_lora_updating=False, lora_folder="") as client:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            refused = await post(client, path, 404, lora_name="red", lora_path="red")
            assert "--allow-runtime-lora-updating" in refused.text
        await post(client, "/v1/completions", 404, model="red", prompt=PROMPT)
        adapters = client.app.state.engines.adapters
        adapters._config = ServerConfig(lora_modules=["red=/no/such"])
        with pytest.raises(ConfigError, match="No adapter found"):
            await adapters.load_modules()


async def test_processes_share_names(client, made, tmp_path):
    """What one API process loads another one knows, and what it takes away too."""
    from octavo.serving.adapters import ServedAdapters

    engine, config = client.app.state.engines.of(), ServerConfig(lora_folder=str(made[1]))
    one, two = (ServedAdapters(engine, config, ["base"]) for _ in range(2))
    one.share(tmp_path)
    two.share(tmp_path)
    await one.load("mine", str(made[1] / "red"))
    assert two.known("mine") == one.known("mine") is not None
    await two.look_for("blue")
    assert two.known("blue") == one.known("blue") is not None
    await two.unload("mine")
    assert one.known("mine") is None and [entry.name for entry in one.listed()] == ["blue"]
