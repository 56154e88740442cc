"""Models that guess tokens change no text, and what they guess is counted."""

import json
import shutil

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.engine.memory_plan import plan_memory
from octavo.engine.speculation.step_costs import StepCosts
from octavo.engine.speculation.workers_drafting import WorkersDrafting
from octavo.metrics import Vector
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.speculative.drafter import Drafter
from octavo.runtime.worker.chained_steps import ChainedSteps
from tests.integration.test_speculation import PROMPTS, drafted, results
from tests.tiny_models import make_oracle, save, tiny_config

COMMON = {"max_model_len": 128, "num_gpu_blocks_override": 400, "dtype": "float32"}
DRAWN = SamplingParams(max_tokens=30, temperature=0.9, seed=3)


@pytest.fixture(autouse=True)
def every_guess_is_tried(monkeypatch):
    """As if guessing and verifying cost nothing."""
    monkeypatch.setattr(StepCosts, "of", lambda costs, rows, more: np.ones(more + 1))
    monkeypatch.setattr(WorkersDrafting, "_best_count", lambda drafting, rows: drafting._wanted.most)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model with the default model's vocabulary, and one of other sizes."""
    config = tiny_config("LlamaForCausalLM") | {"vocab_size": 49152}
    other = config | {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
    sizes = {"target": config, "other": other, "few": config | {"vocab_size": 131}}
    root = tmp_path_factory.mktemp("models")
    return {name: str(save(make_oracle(size), root / name)) for name, size in sizes.items()}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return str(smollm2_path)


@pytest.fixture(scope="module")
def plain(folders, tokenizer):
    with LLM(folders["target"], tokenizer=tokenizer, **COMMON) as llm:
        yield results(llm)


def drafting(folders, tokenizer, draft="target", **options):
    config = {"method": "draft_model", "model": folders[draft], "num_speculative_tokens": 3}
    return LLM(folders["target"], tokenizer=tokenizer, **{**COMMON, "speculative_config": config, **options})


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("draft", "options"),
    [
        ("target", {}),
        ("other", {"num_gpu_blocks_override": 150}),
        ("target", {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 16, "max_num_seqs": 12}),
    ],
    ids=["itself", "another", "preempted and in chunks"],
)
def test_texts_are_the_same(folders, tokenizer, plain, draft, options):
    with drafting(folders, tokenizer, draft, **options) as llm:
        assert results(llm) == plain
        num_guessed, num_accepted = drafted(llm)
        assert num_guessed > 300
        if draft == "target":
            assert num_accepted > 0.5 * num_guessed, "penalties, biases and the like are not guessed"


@pytest.mark.parametrize("shift", [0, 1])
def test_the_model_itself_is_always_right(folders, tokenizer, monkeypatch, shift):
    choose = Drafter.choose

    def shifted(drafter, logits, rows, positions):
        return (choose(drafter, logits, rows, positions) + shift) % 49152

    with LLM(folders["target"], tokenizer=tokenizer, **COMMON) as llm:
        plain = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, DRAWN, use_tqdm=False)]
    monkeypatch.setattr(Drafter, "choose", shifted)
    with drafting(folders, tokenizer, enable_prefix_caching=True) as llm:
        for _ in range(2):  # the second time prompts come from the cache, keys and values of the draft too
            outputs = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
            assert [out.outputs[0].token_ids for out in outputs] == plain
        [by_place] = [m.values for m in llm.get_metrics() if isinstance(m, Vector)] or [[]]
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > 50 and num_accepted == (0 if shift else num_guessed)
    assert sum(by_place) == num_accepted


def test_a_cached_beginning_serves_the_draft(folders, tokenizer):
    """Its keys and values are in the blocks: all it guesses is right, though it computed a part only."""
    prompt = {"prompt_token_ids": list(range(300, 380))}
    with drafting(folders, tokenizer, max_num_seqs=1) as llm:  # which leaves room for drafts, too
        for _ in range(2):
            [out] = llm.generate([prompt], DRAWN, use_tqdm=False)
        assert out.num_cached_tokens >= 64
        num_guessed, num_accepted = drafted(llm)
        assert num_guessed == num_accepted > 20


def test_it_catches_up_when_it_was_not_asked(folders, tokenizer, monkeypatch):
    wanted = iter([0] * 12 + [3] * 100)
    monkeypatch.setattr(WorkersDrafting, "_best_count", lambda drafting, rows: next(wanted))
    with drafting(folders, tokenizer) as llm:
        monkeypatch.setattr("octavo.engine.speculation.workers_drafting._PATIENCE", 1e9)
        llm.generate(PROMPTS[:1], DRAWN, use_tqdm=False)
        num_guessed, num_accepted = drafted(llm)
        assert num_guessed == num_accepted > 9


@pytest.mark.matrix
@pytest.mark.parametrize("shift", [0, 1], ids=["", "shifted"])
@pytest.mark.parametrize("method", ["draft_model", "ngram_gpu"])
def test_chained_steps_change_nothing(folders, tokenizer, monkeypatch, method, shift):
    """Guessed behind steps that nobody waits for; shifted, the negative twin: all are noted as shorter.

    The model itself is always right there, too, so that its cache lacks nothing.
    """
    monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    rows, verify = [], ChainedSteps.verify

    def noted(steps, inputs, *rest):
        rows.append(len(inputs.rows))
        lasts = verify(steps, inputs, *rest)
        steps.state.lengths -= shift
        return lasts

    monkeypatch.setattr(ChainedSteps, "verify", noted)
    config = {"method": method, "num_speculative_tokens": 3}
    config |= {"model": folders["target"]} if method == "draft_model" else {"prompt_lookup_min": 1}
    prompts = [{"prompt_token_ids": [7 * i, 5, 6, 7 * i, 5, 6]} for i in range(20)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=6 + 15 * (i % 7), ignore_eos=True)
        for i in range(20)
    ]
    common = COMMON | {"tokenizer": tokenizer, "max_num_seqs": 96, "block_size": 16}

    def texts(**options):
        with LLM(folders["target"], **common, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [out.outputs[0].token_ids for out in outputs], drafted(llm)

    plain, _ = texts()
    found, (num_guessed, num_accepted) = texts(speculative_config=config, steps_in_flight=2)
    assert (found == plain) != shift
    assert len(rows) > 15 and num_guessed > 200
    if method == "draft_model" and not shift:
        assert num_accepted > 0.95 * num_guessed, "the last drafts of an output may be cut"


@pytest.mark.parametrize("is_chained", [True, False], ids=["chained", ""])
def test_what_is_not_found_is_no_draft(folders, tokenizer, monkeypatch, is_chained):
    """Drawn texts do not repeat themselves; the negative twin: a greedy one of a tiny model does."""
    if is_chained:
        monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    verify, rows = ChainedSteps.verify, []
    monkeypatch.setattr(ChainedSteps, "verify", lambda *given: rows.append(1) or verify(*given))
    prompts = [{"prompt_token_ids": [7, 9, 11, 13 + i]} for i in range(2)]
    common = COMMON | {"tokenizer": tokenizer, "block_size": 16, "max_num_seqs": 8, "steps_in_flight": 2}
    config = {"method": "ngram_gpu", "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    counts = []
    for least, temperature in ((3, 1.0), (1, 0.0)):
        wanted = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
        options = {"speculative_config": config | {"prompt_lookup_min": least}}
        with LLM(folders["target"], **common, **options) as llm:
            outputs = llm.generate(prompts, wanted, use_tqdm=False)
            counts.append(drafted(llm))
        told = [out.outputs[0].spec_decode_metrics for out in outputs]
        assert counts[-1][0] == sum(each.num_draft_tokens for each in told if each)
    assert counts[0] == [0, 0]
    assert counts[1][0] >= counts[1][1] > 2, "what repeats itself is found"
    assert bool(rows) == is_chained


def test_a_request_may_do_without(folders, tokenizer):
    with drafting(folders, tokenizer) as llm:
        llm.generate(PROMPTS, DRAWN, use_tqdm=False, speculative=False)
        assert drafted(llm) == [0, 0]
        llm.generate(PROMPTS[:1], DRAWN, use_tqdm=False, speculative={"num_tokens": 1})
        num_guessed, num_accepted = drafted(llm)
        assert num_guessed == num_accepted and 10 < num_guessed <= 15


def test_sleep_gives_the_draft_up_and_takes_it_back(folders, tokenizer):
    with drafting(folders, tokenizer) as llm:
        first = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
        llm.sleep(level=2)
        llm.wake_up()
        again = llm.generate(PROMPTS, DRAWN, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again]
        num_guessed, num_accepted = drafted(llm)
        assert num_guessed == num_accepted > 50


def test_the_plan_counts_the_draft(folders):
    def plan(**options):
        return plan_memory(resolve(EngineArgs(model=folders["target"], device="cpu", **options)))

    without = plan()
    for draft in ("target", "other"):
        both = plan(spec_model=folders[draft], spec_tokens=2)
        alone = (
            without
            if draft == "target"
            else plan_memory(resolve(EngineArgs(model=folders[draft], device="cpu")))
        )
        assert both.weight_bytes == without.weight_bytes + alone.weight_bytes
        assert both.kv_bytes_per_token > without.kv_bytes_per_token


class Repeats(Drafter):
    """A user's drafter: the last token comes again."""

    def __init__(self, config, model):
        self.kv_specs, self.weight_bytes = [], 0

    def propose(self, turn):
        last = self._state.token_ids[torch.from_numpy(turn.rows), torch.from_numpy(turn.ends)]
        return last[:, None].repeat(1, max(1, int(turn.counts.max())))


def test_a_drafter_of_the_users_own(folders, tokenizer, plain):
    config = {"model": f"{__name__}.Repeats", "num_speculative_tokens": 2}  # a class can be nothing else
    with LLM(folders["target"], tokenizer=tokenizer, **COMMON, speculative_config=config) as llm:
        assert results(llm) == plain
        assert drafted(llm)[0] > 100
    config["model"] = "tests.tiny_models.save"
    with pytest.raises(OctavoError, match=r"is not derived from octavo\.runtime\.speculative\.drafter"):
        LLM(folders["target"], tokenizer=tokenizer, **COMMON, speculative_config=config)


def test_synthetic_acceptance_takes_wrong_drafts(folders, tokenizer):
    config = {
        "method": "draft_model",
        "model": folders["other"],
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM(folders["target"], tokenizer=tokenizer, **COMMON, speculative_config=config) as llm:
        outputs = llm.generate(PROMPTS * 4, params, use_tqdm=False)
        assert all(len(out.outputs[0].token_ids) == 60 for out in outputs)
        values = {
            m.name: m.value for m in llm.get_metrics() if "spec_decode" in m.name and hasattr(m, "value")
        }
    length = 1 + values["vllm:spec_decode_num_accepted_tokens"] / values["vllm:spec_decode_num_drafts"]
    assert 2.3 < length < 2.6, "the last drafts of an output are cut"


def test_a_greedy_draft_is_right_less_often_where_tokens_are_drawn(folders, tokenizer):
    accepted = {}
    for how in ("probabilistic", "greedy"):
        config = {"model": folders["target"], "num_speculative_tokens": 3, "draft_sample_method": how}
        with LLM(folders["target"], tokenizer=tokenizer, **COMMON, speculative_config=config) as llm:
            llm.generate(PROMPTS, DRAWN, use_tqdm=False)
            num_guessed, num_accepted = drafted(llm)
            accepted[how] = num_accepted / num_guessed
    assert accepted["probabilistic"] == 1.0 > accepted["greedy"]


@pytest.mark.slow
def test_ranks_guess_alike(folders, tokenizer):
    """With tensor parallelism, keys and values of the draft are split as the model's are."""
    common = COMMON | {"tensor_parallel_size": 2, "tokenizer": tokenizer}
    with LLM(folders["target"], **common) as llm:
        plain = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, DRAWN, use_tqdm=False)]
    config = {"method": "draft_model", "model": folders["target"], "num_speculative_tokens": 3}
    with LLM(folders["target"], **common, speculative_config=config) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, DRAWN, use_tqdm=False)] == plain
        num_guessed, num_accepted = drafted(llm)
        assert num_guessed == num_accepted > 20


@pytest.mark.parametrize(
    ("draft", "options", "says"),
    [
        ("few", {}, "should have the same vocabulary size. Target model vocab_size=49152"),
        (
            "target",
            {"steps_in_flight": 3},
            "steps_in_flight=3: a step with drafts of draft_model begins with",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folders, tokenizer, draft, options, says):
    with pytest.raises(OctavoError, match=says):
        drafting(folders, tokenizer, draft, **options)


@pytest.fixture(scope="module")
def permuted(tmp_path_factory):
    """A model, and the same with another vocabulary: in another order, without some tokens, with others."""
    size, noise = 300, torch.Generator().manual_seed(0)
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | {"vocab_size": size})
    other = make_oracle(tiny_config("LlamaForCausalLM") | {"vocab_size": size + 7})
    order = torch.randperm(size, generator=noise)[: size - 5]
    with torch.no_grad():
        for target, source in zip(
            other.model.layers.parameters(), oracle.model.layers.parameters(), strict=True
        ):
            target.copy_(source)
        other.model.norm.weight.copy_(oracle.model.norm.weight)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            other.get_parameter(name)[: len(order)] = oracle.get_parameter(name)[order]
    root = tmp_path_factory.mktemp("vocabularies")
    folders = save(oracle, root / "target"), save(other, root / "draft")
    texts = [f"▁{i}" if i % 2 else f"Ġ{i}" for i in range(size)]
    drafts = [f" {i}" for i in order.tolist()] + [f"other {i}" for i in range(12)]
    for folder, tokens in zip(folders, (texts, drafts), strict=True):
        content = {"model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(tokens)}}}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    return [str(folder) for folder in folders]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow)], ids=["one", "ranks"]
)
def test_a_draft_model_may_have_another_vocabulary(permuted, options):
    """The model itself with tokens in another order is nearly always right: only some tokens it has not."""
    target, draft = permuted
    common = COMMON | {"skip_tokenizer_init": True} | options
    prompts = [{"prompt_token_ids": [7 * i % 300, i, 2 * i]} for i in range(1, 9)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, detokenize=False)
    with LLM(target, **common) as llm:
        plain = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    config = {"model": draft, "num_speculative_tokens": 3, "use_heterogeneous_vocab": True}
    with LLM(target, speculative_config=config, **common) as llm:
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)] == plain
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > 100 and num_accepted > 0.7 * num_guessed


def test_vocabularies_must_have_tokens_in_common(permuted, tmp_path):
    target, draft = permuted
    shutil.copytree(draft, tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {" 3": 1}}}))
    config = {"model": str(tmp_path / "draft"), "use_heterogeneous_vocab": True}
    with pytest.raises(OctavoError, match="has 1 of the model's 300 tokens"):
        LLM(target, speculative_config=config, skip_tokenizer_init=True, **COMMON)
