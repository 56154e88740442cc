"""Adapters against PEFT's own forward, in float32, through the whole engine: alone, and in mixed batches."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.lora import CONFIG, WEIGHTS, LoRAConfig
from octavo.lora.request import LoRARequest
from octavo.messages.adapters import AdapterPart, AdapterRef
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.loader.loader import load_model
from octavo.runtime.lora import reader
from octavo.runtime.lora.files import digest_of
from octavo.runtime.platforms.platform import get_platform
from tests import handmade_adapters, peft_adapters
from tests.model_driver import engine_config
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

TOLERANCE = 1e-4
KINDS = {
    "plain": {},
    "wide": {"r": 33},
    "rslora": {"use_rslora": True, "r": 5},
    "patterns": {"rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "query_only": {"target_modules": ["q_proj"]},
    "some": {"target_modules": ["k_proj", "up_proj", "down_proj"]},
    "bias": {"lora_bias": True},
    "dora": {"use_dora": True},
    "dora_of_values": {"use_dora": True, "target_modules": ["v_proj", "o_proj", "gate_proj"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "saved_in_layers": {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"]},
    "tokens": {"target_modules": ["v_proj"], "trainable_token_indices": [*range(130, 0, -3)]},
    "tokens_of_both": {"trainable_token_indices": {"embed_tokens": [*range(60)], "lm_head": [130, 0, 7]}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The oracle, without ties, and its checkpoint."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"tie_word_embeddings": False})
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Of each kind: PEFT's model and a request."""
    made = {}
    for number, (kind, options) in enumerate(KINDS.items(), 1):
        model = peft_adapters.adapt(base[0], seed=number, **options)
        folder = peft_adapters.save(model, tmp_path_factory.mktemp(kind))
        made[kind] = model, LoRARequest(kind, number, folder)
    return made


def engine(folder, **options) -> LLM:
    exact = {"dtype": "float32", "activations": "float32", "kv_cache_dtype": "float32"}
    sizes = {"max_model_len": 256, "max_logprobs": -1, "logprobs_mode": "raw_logits", "max_loras": 16}
    options = {"enable_lora": True, "num_gpu_blocks_override": 256, "skip_tokenizer_init": True} | options
    return LLM(str(folder), seed=0, **exact | sizes | options)


@pytest.fixture(scope="module")
def llm(base):
    return engine(base[1])


def logits_of(outputs, vocab_size: int) -> list[torch.Tensor]:
    """Of each output, what follows the positions from the first on, [T, vocab_size]."""
    rows = []
    for output in outputs:
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        rows.append(torch.tensor([[row[i].logprob for i in range(vocab_size)] for row in entries]))
    return rows


SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=-1, logprobs=-1, ignore_eos=True)


def check(model, output, found: torch.Tensor) -> None:
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    torch.testing.assert_close(found, peft_adapters.logits(model, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_peft_s(base, adapters, llm, kind):
    model, lora = adapters[kind]
    (prompt,) = make_prompts(131, (40,))
    outputs = llm.generate([prompt], SCORED, lora_request=lora, use_tqdm=False)
    (found,) = logits_of(outputs, 131)
    check(model, outputs[0], found)
    plain = peft_adapters.logits(base[0], prompt)
    assert (found[: len(prompt)] - plain).abs().max() > 0.05, "the adapter shows"
    assert outputs[0].lora_request is lora


def test_mixed_batch(base, adapters, llm):
    """All kinds beside rows of the base, some twice; and the same bits as alone."""
    prompts = make_prompts(131, (9, 21, 40))
    wanted = [(None, base[0]), *((lora, model) for model, lora in adapters.values()), (None, base[0])]
    rows = [(prompt, lora, model) for lora, model in wanted for prompt in prompts]
    outputs = llm.generate(
        [prompt for prompt, *_ in rows], SCORED, lora_request=[lora for _, lora, _ in rows], use_tqdm=False
    )
    found = logits_of(outputs, 131)
    for output, logits, (_, _, model) in zip(outputs, found, rows, strict=True):
        check(model, output, logits)
    for index in (1, 4, 16, 25, len(rows) - 1):
        prompt, lora, _ = rows[index]
        llm.reset_prefix_cache()
        alone = logits_of(llm.generate([prompt], SCORED, lora_request=lora, use_tqdm=False), 131)[0]
        assert torch.equal(alone, found[index]), f"row {index} depends on its company"


@pytest.mark.slow
def test_all_ranks_in_one_batch(base, tmp_path):
    """64 adapters of ranks 1 to 128 and rows of the base; some alone, with the same bits."""
    models, loras = [base[0]], [None]
    for rank in (*range(1, 127, 2), 128):
        models.append(handmade_adapters.write(base[0], tmp_path / str(rank), rank, rank))
        loras.append(LoRARequest(f"r{rank}", rank, str(tmp_path / str(rank))))
    many = engine(base[1], max_loras=64, max_lora_rank=128, max_num_seqs=80, num_gpu_blocks_override=400)
    chosen = [i % 65 for i in range(80)]
    prompts = make_prompts(131, tuple(5 + i % 37 for i in range(80)))
    own = [loras[i] for i in chosen]
    outputs = many.generate(prompts, SCORED, lora_request=own, use_tqdm=False)
    found = logits_of(outputs, 131)
    for output, logits, i in zip(outputs, found, chosen, strict=True):
        check(models[i], output, logits)
    many.reset_prefix_cache()
    for row in (1, 33, 64, 65):
        alone = many.generate([prompts[row]], SCORED, lora_request=own[row], use_tqdm=False)
        assert torch.equal(logits_of(alone, 131)[0], found[row])


def test_a_sum_of_adapters(base, adapters):
    """As no request can ask for one yet: what is read of two adapters is the sum of both, each scaled."""
    config = replace(engine_config(base[1]), lora=LoRAConfig(enable_lora=True, max_cpu_loras=8))
    reader = load_model(config, get_platform("cpu", 1), ParallelContext()).adapters

    def deltas(**scales):
        folders = {kind: Path(adapters[kind][1].lora_path) for kind in scales}
        parts = tuple(AdapterPart(str(folders[kind]), digest(folders[kind]), scales[kind]) for kind in scales)
        return {
            name: dense(change, reader.sites.at(name).table.kept_bounds)
            for name, change in reader.read(AdapterRef("sum", parts)).changes.items()
        }

    together, plain, some = deltas(wide=0.5, some=-2.0), deltas(wide=1.0), deltas(some=1.0)
    assert together.keys() == plain.keys() > some.keys()
    for name, found in together.items():
        expected = 0.5 * plain[name] - 2.0 * some.get(name, torch.zeros(()))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_a_large_adapter_lies_in_one_piece(base, adapters, monkeypatch):
    config = replace(engine_config(base[1]), lora=LoRAConfig(enable_lora=True))
    read = load_model(config, get_platform("cpu", 1), ParallelContext()).adapters.read
    folder = Path(adapters["wide"][1].lora_path)
    ref = AdapterRef("wide", (AdapterPart(str(folder), digest(folder), 1.0),))
    plain = read(ref).changes
    monkeypatch.setattr(reader, "_LARGE_PAGE", 1 << 10)
    packed = read(ref).changes
    matrices = [part for change in packed.values() for part in (change.down, change.up)]
    assert all(torch.equal(packed[name].down, change.down) for name, change in plain.items())
    assert all(torch.equal(packed[name].up, change.up) for name, change in plain.items())
    places = sorted((part.data_ptr(), part.nbytes) for part in matrices)
    assert all(0 <= b - a - size < 64 for (a, size), (b, _) in pairwise(places))


def digest(folder: Path) -> bytes:
    return digest_of([(folder / name).read_bytes() for name in (CONFIG, WEIGHTS)])


def dense(change, bounds) -> torch.Tensor:
    """The whole change of a matrix, [N, K]."""
    downs = change.down.chunk(change.parts)
    cuts = bounds if change.parts > 1 else (0, bounds[-1])
    return torch.cat([change.up[:, cuts[i] : cuts[i + 1]].T @ down for i, down in enumerate(downs)])


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 16, "max_num_seqs": 4}, {"enforce_eager": True}, {"max_loras": 2}],
    ids=["chunks", "eager", "two_at_once"],
)
def test_other_engines(base, adapters, options):
    llm = engine(base[1], **options)
    prompts = make_prompts(131, (40, 9))
    rows = [
        (prompt, lora, model)
        for prompt in prompts
        for model, lora in [adapters["plain"], (base[0], None), adapters["dora"], adapters["wide"]]
    ]
    outputs = llm.generate(
        [prompt for prompt, *_ in rows], SCORED, lora_request=[lora for _, lora, _ in rows], use_tqdm=False
    )
    for output, logits, (_, _, model) in zip(outputs, logits_of(outputs, 131), rows, strict=True):
        check(model, output, logits)
