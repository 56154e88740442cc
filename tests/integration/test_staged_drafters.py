"""Drafters with weights in the last of several stages: they read what the stages before hand on."""

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import OctavoError
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve
from octavo.engine.memory_plan import plan_memory
from octavo.engine.speculation.workers_drafting import WorkersDrafting
from octavo.runtime.speculative.drafter import Drafter
from tests.integration import test_dflash as dflash
from tests.integration import test_state_drafters as states
from tests.integration.test_drafters import Repeats
from tests.integration.test_speculation import drafted, results
from tests.integration.test_state_drafters import (
    COMMON,
    COUNT,
    GREEDY,
    PROMPT,
    SHORT,
    every_guess_is_tried,  # noqa: F401  # a fixture of all tests here
    plain,  # noqa: F401  # a fixture
    target,  # noqa: F401  # a fixture
)
from tests.tiny_models import make_oracle, tiny_config

SLOW = pytest.mark.slow
LONG = {"prompt_token_ids": PROMPT["prompt_token_ids"] * 2}
LOSING = {"distributed_executor_backend": "tests.replaying_ranks:LosingExecutor"}


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):  # noqa: F811
    """Random ones by method: (folder, what they guess behind known tokens)."""
    root, oracle = tmp_path_factory.mktemp("heads"), target[0]
    made = {"draft_model": (target[1], None)}
    for kind in ("eagle", "eagle3"):
        weights = states.make_weights(kind)
        folder = states.write(root / kind, states.KINDS[kind][0], weights)
        made[kind] = folder, lambda ids, k=kind, w=weights: states.guesses(k, w, oracle, ids)
    weights = dflash.make_weights("release")
    folder = states.write(root / "dflash", dflash.RELEASE, weights)
    made["dflash"] = folder, lambda ids: dflash.guesses("release", weights, oracle, ids, COUNT)
    return made


def drafting(model, method, folder, num_stages, **options):
    config = {"method": method, "num_speculative_tokens": COUNT} | ({"model": folder} if folder else {})
    return LLM(
        model, **{**COMMON, "speculative_config": config, "pipeline_parallel_size": num_stages, **options}
    )


@pytest.mark.parametrize(
    ("method", "num_stages", "loses"),
    [
        ("eagle3", 2, False),
        pytest.param("eagle3", 3, False, marks=SLOW),
        pytest.param("eagle3", 2, True, marks=SLOW),
        pytest.param("eagle", 2, False, marks=SLOW),
        pytest.param("dflash", 3, False, marks=SLOW),
        pytest.param("dflash", 2, True, marks=SLOW),
    ],
)
def test_guesses_are_those_of_plain_torch(target, heads, monkeypatch, method, num_stages, loses):  # noqa: F811
    """In chunks, then from the cache. loses: the negative twin, whose last stage gets zeros of the others."""
    seen, learn = [], WorkersDrafting.learn

    def noted(drafting, plan, result, took_s):
        seen.extend(
            (list(plan.requests[place].token_ids), drafts)
            for place, drafts in result.drafts.items()
            if drafts
        )
        learn(drafting, plan, result, took_s)

    monkeypatch.setattr(WorkersDrafting, "learn", noted)
    folder, guess = heads[method]
    options = {"skip_tokenizer_init": True, "max_num_batched_tokens": 20, "max_num_seqs": 4, "block_size": 16}
    wanted = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with drafting(target[1], method, folder, num_stages, **options, **LOSING if loses else {}) as llm:
        for _ in range(2):
            [output] = llm.generate([LONG], wanted, use_tqdm=False)
    assert len(seen) >= 6 and output.num_cached_tokens > 20
    agree = [guess(ids)[: len(drafts)] == drafts for ids, drafts in seen]
    assert all(agree) != loses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("draft_model", {}),
        ("draft_model", SHORT),
        ("eagle", {}),
        ("eagle3", SHORT | {"steps_in_flight": 2}),
        ("dflash", SHORT),
    ],
)
def test_texts_are_the_same(target, heads, smollm2_path, plain, method, options):  # noqa: F811
    """With every sampling parameter, again from the cache; some preempted and in chunks."""
    given = {"tokenizer": str(smollm2_path)} | options
    with drafting(target[1], method, heads[method][0], 2, **given) as llm:
        assert results(llm) == plain
        assert results(llm) == plain
        assert drafted(llm)[0] > 10


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0, 1])
def test_a_request_alone_waits_for_its_drafts(target, heads, monkeypatch, shift):  # noqa: F811
    """The model itself guesses: all comes true. shift: the negative twin asks for none, so nothing waits."""
    if shift:
        monkeypatch.setattr(WorkersDrafting, "_best_count", lambda drafting, rows: 0)
    with LLM(target[1], skip_tokenizer_init=True, **COMMON) as llm:
        [expected] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    folder = heads["draft_model"][0]
    with drafting(target[1], "draft_model", folder, 2, skip_tokenizer_init=True, steps_in_flight=2) as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        num_guessed, num_accepted = drafted(llm)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (num_accepted == num_guessed >= 20) != shift


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle3", {"distributed_executor_backend": "tests.replaying_ranks:ReplayingExecutor"}),
        ("dflash", {"distributed_executor_backend": "tests.replaying_ranks:ReplayingExecutor"}),
        ("eagle3", {"tensor_parallel_size": 2}),
        ("draft_model", {"tensor_parallel_size": 2, "num_stages": 3}),
        ("dflash", {"tensor_parallel_size": 2, "num_stages": 1}),
    ],
)
def test_captured_steps_and_ranks_change_nothing(target, heads, method, options):  # noqa: F811
    prompts = [{"prompt_token_ids": ids} for ids in states.PROMPTS[:8]]
    common = {"skip_tokenizer_init": True, "max_num_seqs": 24, "block_size": 16}
    ranks = {"tensor_parallel_size": options.get("tensor_parallel_size", 1)}
    with LLM(target[1], **COMMON, **common, **ranks) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    options = {"num_stages": 2, **options}
    with drafting(target[1], method, heads[method][0], **common, **options) as llm:
        found = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert drafted(llm)[0] > 50
        if "distributed_executor_backend" in options:
            assert min(report["replays"] for report in llm.collective_rpc("describe")) > 10
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "ngram_gpu"])
def test_lookups_change_nothing_over_ranks_and_stages(target, method):  # noqa: F811
    """The second time suffixes of all outputs are known."""
    prompts = [{"prompt_token_ids": [5 + place, 6, 7] * 6} for place in range(6)]
    common = {"skip_tokenizer_init": True, "tensor_parallel_size": 2}

    def twice(llm):
        outputs = [out for _ in range(2) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        return [out.outputs[0].token_ids for out in outputs]

    with LLM(target[1], **COMMON, **common) as llm:
        expected = twice(llm)
    with drafting(target[1], method, None, 2, **common) as llm:
        assert twice(llm) == expected
        num_guessed, num_accepted = drafted(llm)
    assert num_guessed > num_accepted > 10


@pytest.mark.slow
def test_mtp_of_a_recurrent_model(tmp_path):
    """Its states are kept by draft token in every stage."""
    oracle = make_oracle(tiny_config("Qwen3NextForCausalLM"))
    path = states.save_with_mtp(oracle, tmp_path / "target")[0]
    common = {"skip_tokenizer_init": True, "max_num_batched_tokens": 20} | states.EXACT
    prompts = [PROMPT, {"prompt_token_ids": states.PROMPTS[1]}]
    with LLM(path, **COMMON, **common) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with drafting(path, "mtp", None, 2, **common) as llm:
        found = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert drafted(llm)[0] > 20
    assert found == expected


class Keeps(Repeats):
    """A user's drafter that keeps something between steps."""

    def __init__(self, config, model):
        super().__init__(config, model)
        self.kv_specs = model.kv_specs[:1]


@pytest.mark.slow
def test_a_drafter_of_the_users_own(target):  # noqa: F811
    prompts, name = [{"prompt_token_ids": ids} for ids in states.PROMPTS[:8]], f"{__name__}.Keeps"
    common = {"skip_tokenizer_init": True}
    with LLM(target[1], **COMMON, **common) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    repeats = f"{Repeats.__module__}.Repeats"
    with drafting(target[1], "custom_class", repeats, 2, **common) as llm:
        found = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
        assert drafted(llm)[0] > 50
    assert found == expected and issubclass(Repeats, Drafter)
    with pytest.raises(OctavoError, match=r"pipeline_parallel_size=2: .*\.Keeps has a cache"):
        drafting(target[1], "custom_class", name, 2, **common)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_the_plan_counts_a_drafter_where_it_is(target, heads, method):  # noqa: F811
    """In the last stage, whose part is the larger."""
    given = {"method": method, "model": heads[method][0], "num_speculative_tokens": COUNT}
    common = {"skip_tokenizer_init": True, **COMMON, "num_gpu_blocks_override": 0, "max_num_seqs": 4}
    options = {"model": target[1], "speculative_config": given, "pipeline_parallel_size": 2} | common
    plan = plan_memory(resolve(EngineArgs(**options)))
    with LLM(**options) as llm:
        first, last = sorted(llm.collective_rpc("describe"), key=lambda held: held["pp_rank"])
    assert plan.weight_bytes == last["weight_bytes"] > first["weight_bytes"]
    assert plan.num_blocks * plan.kv_bytes_per_block == last["kv_cache_bytes"] >= first["kv_cache_bytes"]
