"""Adapters with everything else: caches, sampling, sleep, preemption, quantized bases, ranks, bad input."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, BeamSearchParams, LoRASum, RequestError, SamplingParams
from octavo.lora.request import LoRARequest
from octavo.runtime.kernels.adapters import LowRank, LowRankTable
from octavo.runtime.kernels.cpu.library import load_library
from octavo.runtime.kernels.cpu.table import table_of
from octavo.runtime.kernels.ref.adapters import add_low_rank
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.lora.reader import AdapterReader
from octavo.runtime.lora.sites import AdapterSlots
from octavo.runtime.platforms import cpu
from octavo.runtime.quantization import unquantized
from tests import peft_adapters
from tests.parity.test_lora import SCORED, check, engine, logits_of
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Three of PEFT's models and requests."""
    models = [peft_adapters.adapt(base[0], seed=i, r=rank) for i, rank in enumerate((4, 9, 3))]
    folders = [peft_adapters.save(model, tmp_path_factory.mktemp("adapter")) for model in models]
    return [(m, LoRARequest(f"a{i}", i + 1, f)) for i, (m, f) in enumerate(zip(models, folders, strict=True))]


@pytest.fixture(scope="module")
def llm(base):
    return engine(base[1], max_loras=2)


def tokens(llm, prompts, lora, params=GREEDY):
    outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
    return [[c.token_ids for c in output.outputs] for output in outputs]


def test_prefixes_are_of_one_adapter(base, adapters, llm, tmp_path):
    """Cached blocks are found under the same contents alone, whatever the name."""
    (prompt,) = make_prompts(131, (90,))
    (first, lora), (second, _), _ = adapters
    folder = tmp_path / "one"
    shutil.copytree(lora.lora_path, folder)

    def run(wanted, model):
        (output,) = llm.generate([prompt], SCORED, lora_request=wanted, use_tqdm=False)
        check(model, output, logits_of([output], 131)[0])
        return llm.generate([prompt], GREEDY, lora_request=wanted, use_tqdm=False)[0].num_cached_tokens

    llm.reset_prefix_cache()
    plain = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    assert plain.num_cached_tokens == 0
    renamed = LoRARequest("again", 77, str(folder))
    assert llm.generate([prompt], GREEDY, lora_request=renamed, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate([prompt], GREEDY, lora_request=lora, use_tqdm=False)[0].num_cached_tokens == 80
    peft_adapters.save(second, folder)  # the same name and path, other weights
    assert llm.generate([prompt], GREEDY, lora_request=renamed, use_tqdm=False)[0].num_cached_tokens == 0
    assert run(renamed, second) == 80 and run(lora, first) == 80 and run(None, base[0]) == 80


def test_without_the_hash_in_the_key_the_cache_leaks(adapters, llm, monkeypatch):
    """The twin of the test above: it would notice."""
    from octavo.messages.request import RequestSpec

    (prompt,) = make_prompts(131, (90,))
    monkeypatch.setattr(RequestSpec, "cache_identity", lambda spec: b"")
    llm.reset_prefix_cache()
    right = tokens(llm, [prompt], adapters[0][1])
    assert llm.generate([prompt], GREEDY, lora_request=adapters[1][1], use_tqdm=False)[0].num_cached_tokens
    llm.reset_prefix_cache()
    assert tokens(llm, [prompt], adapters[0][1]) == right
    llm.reset_prefix_cache()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_trained_rows_of_a_tied_matrix(tmp_path, architecture):
    """They are looked up, and are the head's, beside rows of the base; alone and unscaled only."""
    oracle = make_oracle(tiny_config(architecture) | {"tie_word_embeddings": True})
    model = peft_adapters.adapt(oracle, seed=5, trainable_token_indices=[*range(0, 131, 2)])
    lora = LoRARequest("rows", 60, peft_adapters.save(model, tmp_path / "rows"))
    llm = engine(save(oracle, tmp_path / "base"))
    prompts = make_prompts(131, (21, 9, 40))
    outputs = llm.generate(prompts, SCORED, lora_request=[lora, None, lora], use_tqdm=False)
    for output, found, own in zip(outputs, logits_of(outputs, 131), (model, oracle, model), strict=True):
        check(own, output, found)
    pair = {"A": torch.ones(4, oracle.config.hidden_size), "B": torch.ones(131, 4)}
    head = {f"base_model.model.lm_head.lora_{end}.weight": tensor for end, tensor in pair.items()}
    both = _edited(lora, tmp_path / "both", tensors=lambda found: found | head)
    for wrong, text in (
        (LoRASum(((lora, 0.5),)), "cannot be scaled"),
        (both, "cannot be added to other changes"),
    ):
        (output,) = llm.generate(prompts[:1], GREEDY, lora_request=wrong, use_tqdm=False)
        assert f"trainable_token_indices {text}" in output.outputs[0].error


@pytest.mark.parametrize("fault", ["scale", "swapped", "misplaced", "rows"])
def test_faults_show(base, adapters, monkeypatch, fault):
    """Each broken mechanism is far outside of what the parity tests allow."""
    if fault == "scale":
        monkeypatch.setattr("octavo.config.lora.PeftConfig.scaling", lambda *_: 1.0)
    elif fault == "rows":
        find = AdapterSlots.of
        monkeypatch.setattr(AdapterSlots, "of", lambda self, count: find(self, count).roll(1))
    else:
        join = AdapterReader._join

        def broken(self, draft, site):
            change = join(self, draft, site)
            down = change.down.flip(0) if fault == "swapped" else change.down
            up = change.up.roll(8, 1) if fault == "misplaced" else change.up
            return change._replace(down=down.contiguous(), up=up.contiguous())

        monkeypatch.setattr(AdapterReader, "_join", broken)
    prompts = make_prompts(131, (21, 9))
    outputs = engine(base[1]).generate(prompts, SCORED, lora_request=[adapters[0][1], None], use_tqdm=False)
    found = logits_of(outputs, 131)[0]
    ids = [*prompts[0], *outputs[0].outputs[0].token_ids][:-1]
    assert (found - peft_adapters.logits(adapters[0][0], ids)).abs().max() > 0.01


def test_sampling_and_small_caches(base, adapters, llm):
    """n, seeds, penalties, preemption and few slots change no token of anybody."""
    prompts = make_prompts(131, (40, 9, 21, 33))
    loras = [adapters[0][1], None, adapters[1][1], adapters[2][1]]
    params = SamplingParams(
        temperature=0.9, seed=3, n=3, max_tokens=24, presence_penalty=0.5, logprobs=2, ignore_eos=True
    )
    alone = [tokens(llm, [p], lora, params)[0] for p, lora in zip(prompts, loras, strict=True)]
    assert alone[0] != tokens(llm, [prompts[0]], adapters[1][1], params)[0]
    small = engine(base[1], num_gpu_blocks_override=12, max_model_len=96, max_loras=1, swap_space=0.0)
    assert tokens(small, prompts, loras, params) == alone
    assert small.llm_engine.core.stats.num_preemptions > 0
    in_flight = engine(base[1], steps_in_flight=2, max_num_batched_tokens=16, max_num_seqs=16)
    assert tokens(in_flight, prompts, loras, params) == alone


def test_single_rows_have_a_product_of_their_own(base, adapters, monkeypatch):
    """A kernel that multiplies and changes is asked first, in decoding too; what it leaves others compute."""
    asked, table = [], ref_table()

    def multiply(x, weight, bias, groups, changes):
        asked.append(len(x))
        if len(x) > 1:
            return None
        out = table.linear.matmul(x, weight, bias)
        table.adapters.add_low_rank(x, out, groups, changes, bias)
        return out

    table = replace(table, adapters=replace(table.adapters, multiply=multiply))
    monkeypatch.setattr(cpu, "cpu_table", lambda threads, snapshot: table)
    monkeypatch.setattr(unquantized, "WidenedLinear", unquantized.DenseLinear)  # as on a GPU
    model, lora = adapters[0]
    outputs = engine(base[1], enforce_eager=True).generate(
        make_prompts(131, (9,)), SCORED, lora_request=lora, use_tqdm=False
    )
    check(model, outputs[0], logits_of(outputs, 131)[0])
    per_step = asked.count(9)
    assert per_step > 0 and asked == [9] * per_step + [1] * (3 * per_step)


def test_sleep_keeps_adapters(adapters, llm):
    (prompt,) = make_prompts(131, (21,))
    before = tokens(llm, [prompt], adapters[0][1]), tokens(llm, [prompt], None)
    llm.sleep(level=2)
    llm.wake_up()
    assert (tokens(llm, [prompt], adapters[0][1]), tokens(llm, [prompt], None)) == before


def test_beams(base, adapters):
    llm = engine(base[1], logprobs_mode="raw_logprobs")
    (prompt,) = make_prompts(131, (9,))
    found = llm.beam_search(
        [{"prompt_token_ids": prompt}], BeamSearchParams(3, 6, ignore_eos=True), lora_request=adapters[0][1]
    )
    plain = llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(3, 6, ignore_eos=True))
    assert found[0].sequences[0].tokens != plain[0].sequences[0].tokens


def test_pool_of_adapters(base, adapters):
    """add, list, pin and remove; two in memory; what is removed is loaded again when it is asked for."""
    llm = engine(base[1], max_loras=1, max_cpu_loras=2)
    verbs, (prompt,) = llm.llm_engine, make_prompts(131, (9,))
    loras = [lora for _, lora in adapters]
    assert [verbs.add_lora(lora) for lora in loras] == [True, True, True]
    assert verbs.list_loras() == {1, 2, 3} and not verbs.add_lora(loras[0])
    with pytest.raises(RequestError, match="lora_int_id 1 belongs to 'a0'"):
        verbs.add_lora(LoRARequest("other", 1, loras[1].lora_path))
    assert verbs.add_lora(LoRARequest("other", 1, loras[1].lora_path, load_inplace=True))
    assert verbs.pin_lora(2) and verbs.remove_lora(3) and not verbs.remove_lora(3)
    with pytest.raises(RequestError, match=r"Pinning failed\. LoRA 3 is not registered"):
        verbs.pin_lora(3)
    results = [tokens(llm, [prompt], lora) for _ in range(2) for lora in loras]
    assert results[:3] == results[3:] and len({str(result) for result in results}) == 3
    (counts,) = verbs.collective_rpc("adapter_counts")
    assert counts["evictions"] >= 2 and counts["loads"] > 3


@pytest.mark.parametrize(
    "architecture",
    [
        *("Qwen2ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM"),
        *("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"),
    ],
)
def test_other_families(tmp_path, architecture):
    """Biases, norms around layers, transposed, fused and regrouped matrices, experts beside attention."""
    oracle = make_oracle(tiny_config(architecture))
    targets = {
        "GPT2LMHeadModel": ["c_attn", "c_proj", "c_fc"],
        "Phi3ForCausalLM": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "Qwen3MoeForCausalLM": ["q_proj", "v_proj", "o_proj"],
        "Qwen3NextForCausalLM": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
    }.get(architecture, peft_adapters.ALL_LINEAR)
    folder = save(oracle, tmp_path / "base")
    for kind in {}, {"use_dora": True}:
        model = peft_adapters.adapt(oracle, target_modules=targets, **kind)
        lora = LoRARequest("a", 1, peft_adapters.save(model, tmp_path / f"adapter{len(kind)}"))
        llm = engine(folder)
        prompts = make_prompts(131, (21, 9))
        outputs = llm.generate(prompts, SCORED, lora_request=[lora, None], use_tqdm=False)
        for output, found, wanted in zip(outputs, logits_of(outputs, 131), (model, oracle), strict=True):
            check(wanted, output, found)


def test_tensor_parallel(base, adapters, llm, tmp_path):
    """Two ranks; DoRA's norms, a bias of a split product, and rows of tokens among the changes."""
    rows = {"embed_tokens": [130, *range(0, 99, 2)], "lm_head": [*range(50, 90)]}
    kinds = [{"use_dora": True}, {"lora_bias": True}, {"trainable_token_indices": rows}]
    models = [peft_adapters.adapt(base[0], seed=9, **kind) for kind in kinds]
    folders = [peft_adapters.save(model, tmp_path / str(i)) for i, model in enumerate(models)]
    loras = [*(LoRARequest("x", 8 + i, f) for i, f in enumerate(folders)), adapters[1][1], None]
    prompts = make_prompts(131, (40, 9, 33, 21, 7))
    two = engine(base[1], tensor_parallel_size=2, max_loras=4)
    outputs = two.generate(prompts, SCORED, lora_request=loras, use_tqdm=False)
    wanted = [*models, adapters[1][0], base[0]]
    for output, found, model in zip(outputs, logits_of(outputs, 131), wanted, strict=True):
        check(model, output, found)
    missing = LoRARequest("gone", 99, adapters[0][1].lora_path)
    assert two.llm_engine.add_lora(missing) and two.llm_engine.list_loras() == {99}


def _edited(lora, folder: Path, config=None, tensors=None) -> LoRARequest:
    shutil.copytree(lora.lora_path, folder)
    path = folder / "adapter_config.json"
    content = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    if tensors is not None:
        found = load_file(folder / "adapter_model.safetensors")
        save_file(tensors(found), folder / "adapter_model.safetensors")
    return LoRARequest("bad", 50, str(folder))


def _first(change):
    def edit(found):
        name = next(name for name in found if "v_proj.lora_A" in name)
        return found | {name: change(found[name])}

    return edit


TOKENS = "base_model.model.model.embed_tokens"
BAD = {
    "rank 0": ({"r": 0}, None, "r must be a positive integer, found 0"),
    "no alpha": ({"lora_alpha": ...}, None, "lora_alpha must be a number, found None"),
    "large rank": ({"r": 500}, None, "LoRA rank 500 is greater than max_lora_rank 64"),
    "prompt tuning": ({"peft_type": "PROMPT_TUNING"}, None, "peft_type 'PROMPT_TUNING' is not supported"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, None, "path_initial_model_for_weight_conversion"),
    "biases": ({"bias": "some"}, None, "bias='some' is not supported"),
    "activated biases": (
        {"alora_invocation_tokens": [1], "bias": "all"},
        None,
        "an activated adapter .* is plain LoRA",
    ),
    "activated": ({"alora_invocation_tokens": "x"}, None, "must be token ids"),
    "shape": (None, _first(lambda a: a[:, :-1].clone()), r"v_proj.lora_A has shape \[4, 47\].*\[4, 48\]"),
    "nan": (None, _first(lambda a: a * torch.nan), "v_proj.lora_A.weight holds values that are not finite"),
    "another rank": ({"r": 5}, dict, "lora_A has rank 4, the adapter's config says 5"),
    "dora": ({"use_dora": True}, dict, "use_dora, but there is no lora_magnitude_vector"),
    "lone": (None, lambda found: dict(list(found.items())[1:]), "has only one of lora_A and lora_B"),
    "no tokens": ({"trainable_token_indices": [1, 1]}, None, "must be token ids, each once"),
    "lost tokens": ({"trainable_token_indices": [1]}, dict, "there is no trainable_tokens_delta"),
    "other tokens": (
        {"trainable_token_indices": [1, 131]},
        lambda found: found | {f"{TOKENS}.token_adapter.trainable_tokens_delta": torch.ones(2, 48)},
        "embed_tokens: trainable_token_indices may replace rows .* below 131",
    ),
    "saved bias": (
        {"modules_to_save": ["o_proj"]},
        lambda found: found | {"base_model.model.model.layers.1.self_attn.o_proj.bias": torch.ones(48)},
        r"o_proj.bias has shape \[48\]; the model has none",
    ),
    "norm's bias": (
        {"bias": "all"},
        lambda found: found | {"base_model.model.model.layers.1.input_layernorm.bias": torch.ones(48)},
        "input_layernorm: .* norms stay the base's",
    ),
    "stranger": (
        None,
        lambda found: found | {"base_model.model.x.lora_A.weight": torch.ones(4, 4)},
        "no such matrix",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapters(adapters, llm, tmp_path, kind):
    """One clear error, of the request alone."""
    config, tensors, says = BAD[kind]
    bad = _edited(adapters[0][1], tmp_path / "bad", config, tensors)
    (prompt,) = make_prompts(131, (9,))
    with pytest.raises(RequestError, match=says):
        llm.llm_engine.add_lora(bad)
    if tensors is None:
        with pytest.raises(RequestError, match=says):
            llm.generate([prompt], GREEDY, lora_request=bad, use_tqdm=False)
    else:
        outputs = llm.generate([prompt] * 2, GREEDY, lora_request=[bad, adapters[1][1]], use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "Loading lora bad failed" in outputs[0].outputs[0].error
        assert outputs[1].outputs[0].finish_reason == "length"
    assert tokens(llm, [prompt], adapters[1][1]) != tokens(llm, [prompt], None)


def test_missing_and_pickled_files(adapters, llm, tmp_path):
    for path in (str(tmp_path), str(tmp_path / "nowhere")):
        with pytest.raises(RequestError, match="No adapter found for"):
            llm.generate([[1]], GREEDY, lora_request=LoRARequest("x", 9, path), use_tqdm=False)
    shutil.copytree(adapters[0][1].lora_path, tmp_path / "a")
    (tmp_path / "a/adapter_model.safetensors").rename(tmp_path / "a/adapter_model.bin")
    with pytest.raises(RequestError, match="a pickle file, is never read"):
        llm.llm_engine.add_lora(LoRARequest("x", 9, str(tmp_path / "a")))
    for fields, says in [
        (("x", 0, "p"), "id must be > 0, got 0"),
        (("x", 1, ""), "lora_path cannot be empty"),
    ]:
        with pytest.raises(RequestError, match=says):
            LoRARequest(*fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(48, (48, 16, 16)), (577, (1030,)), (64, (7, 520, 1))])
def test_kernel_is_the_reference(dtype, sizes):
    """Ragged sizes, ranks of any number; a row's bits depend on neither the others nor the threads."""
    library = load_library()
    if library is None:
        pytest.skip("no compiler")
    inputs, outputs = sizes
    bounds = tuple(sum(outputs[:i]) for i in range(len(outputs) + 1))
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    table = LowRankTable(
        torch.zeros(5, 6, dtype=torch.int64), torch.tensor(bounds, dtype=torch.int32), dtype, bounds, 64
    )
    for slot, (rank, parts) in enumerate([(1, 1), (5, len(outputs)), (16, 1), (33, len(outputs))], 1):
        down, up = random(rank * parts, inputs).to(dtype), random(rank, bounds[-1]).to(dtype)
        ends = (random(bounds[-1]), random(bounds[-1])) if slot % 2 else (None, None)
        table.put(slot, LowRank(down, up, parts, *ends))
    x, out, bias = random(37, inputs + 3)[:, :inputs], random(37, bounds[-1]), random(bounds[-1])
    slots = torch.randint(0, 5, (37,), generator=generator, dtype=torch.int32)
    wanted, found = out.clone(), out.clone()
    add_low_rank(x, wanted, slots, table, bias)
    kernels = [table_of(library, threads).adapters.add_low_rank for threads in (1, 3)]
    kernels[1](x, found, slots, table, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-3)
    assert torch.equal(found[slots == 0], out[slots == 0]) and not torch.equal(found, out)
    for row in range(0, 37, 5):
        alone = out[row : row + 1].clone()
        kernels[0](x[row : row + 1], alone, slots[row : row + 1].clone(), table, bias)
        assert torch.equal(alone[0], found[row])


def test_quantized_default_model(tmp_path):
    """SmolLM2's Q4 blocks: the adapter's change is that of PEFT over the same matrices, unpacked."""
    llm = LLM(enable_lora=True, max_model_len=128, seed=0, max_logprobs=-1)
    width, layers = 576, 30
    tensors = {}
    for layer in range(layers):
        for name, size in (("self_attn.q_proj", 576), ("mlp.down_proj", 576)):
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(8, width if "q_" in name else 1536)
            tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(size, 8)
    folder = tmp_path / "q4"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    lora = LoRARequest("q4", 1, str(folder))
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = ["The capital of France is", "Once upon a time"]
    mixed = llm.generate(prompts * 2, params, lora_request=[lora, lora, None, None], use_tqdm=False)
    plain = llm.generate(prompts, params, use_tqdm=False)
    alone = llm.generate(prompts[:1], params, lora_request=lora, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in mixed[2:]] == [o.outputs[0].token_ids for o in plain]
    assert mixed[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert mixed[0].outputs[0].token_ids != mixed[2].outputs[0].token_ids
