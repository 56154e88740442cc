"""Adapters on a GPU against the model with them merged, recorded and not; ranks 1 to 128 in one batch."""

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.lora.request import LoRARequest
from octavo.runtime.kernels.triton.table import cuda_table
from octavo.runtime.lora.sites import AdapterSlots, Reach
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from tests import handmade_adapters
from tests.parity.test_int8_weights import SIZES
from tests.tiny_models import make_oracle, make_prompts, oracle_logits, save, tiny_config

pytestmark = pytest.mark.gpu
RANKS = [1 + 2 * i for i in range(63)] + [128]
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=-1, logprobs=-1, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | SIZES | {"tie_word_embeddings": False})
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Of each rank: the merged model and a request."""
    folder = tmp_path_factory.mktemp("adapters")
    made = []
    for rank in RANKS:
        model = handmade_adapters.write(base[0], folder / str(rank), rank, rank)
        made.append((model, LoRARequest(f"r{rank}", rank, str(folder / str(rank)))))
    return made


def engine(folder, **options) -> LLM:
    sizes = {"max_model_len": 256, "max_logprobs": -1, "logprobs_mode": "raw_logits", "max_num_seqs": 80}
    room = {"num_gpu_blocks_override": 1000, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.3}
    lora = {"enable_lora": True, "max_loras": 64, "max_lora_rank": 128, "dtype": "float32"}
    return LLM(str(folder), seed=0, **sizes | room | lora | options)


def logits_of(output, vocab_size: int) -> torch.Tensor:
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([[row[i].logprob for i in range(vocab_size)] for row in entries])


def error(output, model) -> float:
    """The largest difference to the logits of `model`."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    return (logits_of(output, model.config.vocab_size) - oracle_logits(model, ids)).abs().max().item()


def tokens(llm, work, params=GREEDY) -> list[list[int]]:
    prompts, loras = zip(*work, strict=True)
    outputs = llm.generate(list(prompts), params, lora_request=list(loras), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def scored(llm, work):
    prompts, loras = zip(*work, strict=True)
    return llm.generate(list(prompts), SCORED, lora_request=list(loras), use_tqdm=False)


def mixed(base, adapters, count=64):
    """Prompts of all kinds of lengths, every fifth for the base; the models that answer."""
    prompts = make_prompts(base[0].config.vocab_size, tuple(5 + i % 37 for i in range(count)))
    wanted = [(base[0], None) if i % 5 == 4 else adapters[i % len(adapters)] for i in range(count)]
    return [(p, lora) for p, (_, lora) in zip(prompts, wanted, strict=True)], [model for model, _ in wanted]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_all_ranks_in_one_batch(base, adapters, eager):
    """64 adapters of ranks 1 to 128, and rows of the base, in float32."""
    with engine(base[1], enforce_eager=eager) as llm:
        work, models = mixed(base, adapters, 80)
        outputs = scored(llm, work)
    assert max(map(error, outputs, models)) < 1e-4
    assert error(outputs[0], base[0]) > 0.05, "the adapter shows"


def drift(output, model) -> float:
    """The same of the tokens that were generated, in steps that may have been recorded."""
    rows, numbers = output.outputs[0].logprobs, range(model.config.vocab_size)
    found = torch.tensor([[row[i].logprob for i in numbers] for row in rows])
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    return (found - oracle_logits(model, ids)[-len(found) :]).abs().max().item()


def test_captured_as_close_as_eager_in_bfloat16(base, adapters):
    """Adapters that came after the capture, and slots in turn. (Padding changes roundings of the base.)"""
    work, models = mixed(base, adapters, 16)
    params, drifts = SamplingParams(temperature=0, max_tokens=24, logprobs=-1, ignore_eos=True), []
    for options in {"enforce_eager": True}, {}, {"max_loras": 3, "max_cpu_loras": 4}:
        with engine(base[1], dtype="bfloat16", **options) as llm:
            prompts, loras = zip(*work, strict=True)
            outputs = llm.generate(list(prompts), params, lora_request=list(loras), use_tqdm=False)
        drifts.append(max(map(drift, outputs, models)))
    assert max(drifts) <= 1.5 * drifts[0] + 0.01
    assert drift(outputs[0], base[0]) > 2 * max(drifts), "the adapter shows"


def test_float32_tokens_whatever_the_company(base, adapters):
    """Alone, together, with few slots, cut into chunks, twice in flight: the same tokens."""
    work, _ = mixed(base, adapters, 24)
    with engine(base[1]) as llm:
        together = tokens(llm, work)
        assert [tokens(llm, [row])[0] for row in work] == together
        plain = tokens(llm, [(prompt, None) for prompt, _ in work])
    assert sum(a != b for a, b in zip(plain, together, strict=True)) >= 15
    assert [plain[i] for i in range(4, 24, 5)] == [together[i] for i in range(4, 24, 5)]
    for options in {"max_loras": 2, "max_cpu_loras": 3}, {"max_num_batched_tokens": 32, "max_num_seqs": 8}:
        with engine(base[1], **options) as llm:
            assert tokens(llm, work) == together


def test_others_slots_show(base, adapters, monkeypatch):
    """The twin: rows with their neighbours' adapters are far from what they should be."""
    begin = AdapterSlots.begin

    def wrong(self, rows, samples):
        begin(self, np.full_like(rows, rows.max()), samples)

    monkeypatch.setattr(AdapterSlots, "begin", wrong)
    with engine(base[1]) as llm:
        work, models = mixed(base, adapters, 5)
        outputs = scored(llm, work)
    assert max(map(error, outputs, models)) > 0.05


def test_experts_captured_and_eager(tmp_path, monkeypatch):
    """Adapters of experts, of products, and rows of the base in one batch; alone each says the same."""
    oracle = make_oracle(tiny_config("Qwen3MoeForCausalLM"))
    models = [
        handmade_adapters.write_experts(oracle, tmp_path / str(rank), rank, rank) for rank in (2, 9, 40)
    ]
    models += [handmade_adapters.write(oracle, tmp_path / "3", 3, 3), oracle]
    loras = [*(LoRARequest(rank, int(rank), str(tmp_path / rank)) for rank in ("2", "9", "40", "3")), None]
    folder, prompts = save(oracle, tmp_path / "base"), make_prompts(131, tuple(5 + i % 37 for i in range(40)))
    work, said, seen, run = list(zip(prompts, loras * 8, strict=True)), [], [], CUDAGraphs._run

    def noted(steps, shape, end, part=0):
        seen.append((shape.reach, shape.chunks > 0, (shape, end) in steps._captured))
        run(steps, shape, end, part)

    monkeypatch.setattr(CUDAGraphs, "_run", noted)
    for options in {"enforce_eager": True}, {}:
        with engine(folder, **options) as llm:
            assert max(map(error, scored(llm, work), models * 8)) < 1e-4
            seen.clear()
            said += [tokens(llm, work), [tokens(llm, [row])[0] for row in work]]
            plain = tokens(llm, [(prompt, None) for prompt in prompts])
    assert said[1:] == said[:1] * 3
    assert sum(a != b for a, b in zip(said[0], plain, strict=True)) > 20
    assert {(Reach.EXPERTS, True, True), (Reach.EXPERTS, False, True)} <= {*seen}
    assert (Reach.EXPERTS, False, False) not in seen, "a step of single tokens that was not captured"


def test_tables_captured_and_eager(base, tmp_path, monkeypatch):
    """Embeddings of any rank, whole ones and a whole head, a layer's matrix, beside rows of the base."""
    kinds = {"5": (), "40": (), "1": ("embed_tokens", "lm_head"), "2": ("o_proj",)}
    models = [
        handmade_adapters.write_tables(base[0], tmp_path / kind, int(kind), kinds[kind]) for kind in kinds
    ]
    loras = [*(LoRARequest(kind, int(kind), str(tmp_path / kind)) for kind in kinds), None]
    prompts = make_prompts(base[0].config.vocab_size, tuple(5 + i % 37 for i in range(40)))
    work, said, seen, run = list(zip(prompts, loras * 8, strict=True)), [], set(), CUDAGraphs._run

    def noted(steps, shape, end, part=0):
        seen.add((shape.reach, shape.chunks > 0, (shape, end) in steps._captured))
        run(steps, shape, end, part)

    monkeypatch.setattr(CUDAGraphs, "_run", noted)
    for options in {"enforce_eager": True}, {}:
        with engine(base[1], **options) as llm:
            assert max(map(error, scored(llm, work), [*models, base[0]] * 8)) < 1e-4
            said += [tokens(llm, work), [tokens(llm, [row])[0] for row in work]]
            plain = tokens(llm, [(prompt, None) for prompt in prompts])
    assert said[1:] == said[:1] * 3
    assert sum(a != b for a, b in zip(said[0], plain, strict=True)) > 20
    assert {(Reach.WHOLES, True, True), (Reach.WHOLES, False, True), (Reach.EMBEDDINGS, False, True)} <= seen


def test_a_quantized_base(base, adapters):
    """int8 on the GPU as on the CPU."""
    work, _ = mixed(base, adapters, 10)
    found = []
    for options in (
        {"device": "cuda"},
        {"device": "cpu", "activations": "float32", "kv_cache_dtype": "float32"},
    ):
        with engine(base[1], quantization="int8", **options) as llm:
            outputs = scored(llm, work)
            found.append([logits_of(output, base[0].config.vocab_size)[:5] for output in outputs])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-3, rtol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks(base, adapters):
    work, models = mixed(base, adapters, 20)
    with engine(base[1], tensor_parallel_size=2) as llm:
        outputs = scored(llm, work)
    assert max(map(error, outputs, models)) < 1e-4


def test_a_captured_product_serves_adapters_of_later():
    """Bit by bit what is computed without a capture, in bfloat16."""
    from tests.kernels.test_adapters import make_table

    table, random = make_table(torch.bfloat16, 2064, (520, 64, 64), "cuda")
    x, out = random(64, 2064).bfloat16(), random(64, 648).bfloat16()
    kernels, entries = cuda_table().adapters, table.entries.clone()
    slots = torch.zeros(64, dtype=torch.int32, device="cuda")
    kept = [out.clone() for _ in range(2)]

    def compute(target):
        groups = kernels.group(slots, 6)
        target.copy_(out)
        kernels.add_low_rank(x, target, groups, table, None)

    table.entries.zero_()
    compute(kept[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute(kept[0])
    table.entries.copy_(entries)
    slots.copy_(torch.arange(64) % 6)
    graph.replay()
    compute(kept[1])
    assert torch.equal(*kept) and not torch.equal(kept[0], out)


def test_captured_experts_serve_adapters_of_later():
    """Bit by bit what is computed without a capture."""
    from tests.kernels.test_changed_experts import ExpertForm, H, make_call

    kernels, slots = cuda_table(), torch.zeros(64, dtype=torch.int32, device="cuda")
    x, routing, stacks, changes = make_call(kernels, slots, "cuda")
    entries = [table.entries for table in (changes.up, changes.down)]
    kept = [entry.clone() for entry in entries]

    def compute():
        return kernels.experts.block_experts(x, routing, stacks, ExpertForm(changes=changes), None)

    for entry in entries:
        entry.zero_()
    plain = compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    for entry, values in zip(entries, kept, strict=True):
        entry.copy_(values)
    slots.copy_(torch.arange(64) % 5)
    graph.replay()
    assert captured.shape == (64, H) and torch.equal(captured, compute())
    assert not torch.equal(captured, plain)
