"""Models with recurrent layers in the engine: chunks, preemption, prefixes, forks, and what states take."""

from dataclasses import replace

import pytest
import torch

from octavo import LLM, EngineArgs, SamplingParams
from octavo.base.errors import ConfigError, Unsupported
from octavo.config.resolve import resolve
from octavo.engine.kvcache.manager import KVCacheManager
from octavo.engine.memory_plan import plan_memory
from octavo.runtime.layers.recurrent import Recurrent
from octavo.runtime.platforms.cpu import CPUPlatform
from octavo.runtime.worker.recorded_calls import RecordedCalls
from octavo.runtime.worker.worker import Worker
from tests.tiny_models import RECURRENT, make_oracle, make_prompts, oracle_greedy, save, tiny_config

pytestmark = pytest.mark.matrix(3)

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "max_model_len": 240}
EXACT = {"activations": "float32", "kv_cache_dtype": "float32", "mamba_block_size": 4}
LENGTHS = (100, 1, 9, 90, 150)
BLOCKS = {"FalconH1ForCausalLM": 14, "GraniteMoeHybridForCausalLM": 8}
BLOCKS |= dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), 110)
"""That hold less than two of the five requests at their ends; of the others 25."""
KINDS = ("tensor_parallel_size", "pipeline_parallel_size")
FIRST = ("Qwen3NextForCausalLM", KINDS[0])


@pytest.fixture(scope="module", params=RECURRENT)
def pair(request, tmp_path_factory):
    oracle = make_oracle(tiny_config(request.param))
    return oracle, save(oracle, tmp_path_factory.mktemp(request.param))


def metrics(llm):
    return {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}


def wrong_outputs(oracle, llm, prompts):
    """The places of prompts whose greedy output is not the oracle's."""
    outputs = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    pairs = enumerate(zip(prompts, outputs, strict=True))
    return [i for i, (prompt, made) in pairs if made != oracle_greedy(oracle, prompt, made)]


@pytest.mark.parametrize("is_tight", [False, True], ids=["plenty", "tight"])
def test_greedy_tokens(pair, is_tight):
    """Twice, so that prefixes are found."""
    oracle, folder = pair
    options = {"num_gpu_blocks_override": 1000}
    if is_tight:
        blocks = BLOCKS.get(oracle.config.architectures[0], 25)
        options = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": 24}
    with LLM(str(folder), **OPTIONS, **EXACT, **options) as llm:
        for _ in range(2):
            assert not wrong_outputs(oracle, llm, make_prompts(131, LENGTHS))
        seen = metrics(llm)
        assert is_tight or seen["vllm:prefix_cache_hits"] > 0
        assert (seen["vllm:num_preemptions"] > 0) == is_tight


def _off_by(count):
    """The states of requests that are so many tokens longer than they are."""

    def of(layer, batch, of=Recurrent.states):
        states = of(layer, batch)
        return states._replace(batch=replace(states.batch, kv_lens=states.batch.kv_lens + count))

    return of


@pytest.mark.parametrize("mutant", ["not_reset", "no_state_of_the_prefix"])
def test_a_mutant_shows(tmp_path, monkeypatch, mutant):
    """A request that begins reads what its block had; one that continues begins with zeros."""
    oracle = make_oracle(tiny_config("Qwen3_5ForCausalLM"))
    folder = save(oracle, tmp_path)
    with LLM(str(folder), **OPTIONS, **EXACT, num_gpu_blocks_override=400, enforce_eager=True) as llm:
        prompts = make_prompts(131, LENGTHS)
        assert not wrong_outputs(oracle, llm, prompts)
        if mutant == "not_reset":
            monkeypatch.setattr(Recurrent, "states", _off_by(1))
            prompts = [list(reversed(prompt)) for prompt in prompts]
        else:
            match = KVCacheManager.match

            def without_states(manager, chain, token_ids):
                found = match(manager, chain, token_ids)
                for group in manager.groups:
                    if group.keeps_states and found.num_tokens:
                        found.blocks[group.index][-1] = found.blocks[0][-1]
                return found

            monkeypatch.setattr(KVCacheManager, "match", without_states)
        assert wrong_outputs(oracle, llm, prompts)


def test_children_begin_with_the_states_of_their_parent(pair, monkeypatch):
    """They sample what they sample when they compute the prompt themselves."""
    _, folder = pair
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts, forks = make_prompts(131, (1, 30, 90)), []
    fork = KVCacheManager.fork

    def noted(manager, leader, num_tokens):
        found = fork(manager, leader, num_tokens)
        forks.append(found)
        return found

    with LLM(str(folder), **OPTIONS, **EXACT, num_gpu_blocks_override=400) as llm:
        alone = []
        for patched in (noted, lambda *_: None):
            monkeypatch.setattr(KVCacheManager, "fork", patched)
            assert llm.reset_prefix_cache()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            alone.append([[list(c.token_ids) for c in output.outputs] for output in outputs])
    assert alone[0] == alone[1]
    assert len(forks) >= 6 and all(forks)
    assert len({tuple(tokens) for tokens in alone[0][2]}) == 3


def test_recorded_calls_serve_recurrent_layers(tmp_path, monkeypatch):
    folder = save(make_oracle(tiny_config("Qwen3_5ForCausalLM")), tmp_path)
    outputs, recorded = [], []
    record = RecordedCalls._record_forward

    def noted(replayer, batch, end):
        replay = record(replayer, batch, end)
        recorded.append(replay is not None)
        return replay

    monkeypatch.setattr(RecordedCalls, "_record_forward", noted)
    for eager in (False, True):
        with LLM(str(folder), **OPTIONS, **EXACT, num_gpu_blocks_override=100, enforce_eager=eager) as llm:
            made = llm.generate(make_prompts(131, LENGTHS), GREEDY, use_tqdm=False)
            outputs.append([list(output.outputs[0].token_ids) for output in made])
    assert outputs[0] == outputs[1]
    assert recorded and all(recorded)


def test_a_state_takes_what_it_says(tmp_path, monkeypatch):
    """Of each recurrent layer: inputs of the convolution, and a matrix per head, in float32."""
    seen = []
    make = Worker._make_runner

    def noted(worker, plan):
        runner = make(worker, plan)
        seen.append((plan, runner.cache))
        return runner

    monkeypatch.setattr(Worker, "_make_runner", noted)
    folder = save(make_oracle(tiny_config("Qwen3_5ForCausalLM")), tmp_path)
    with LLM(str(folder), **OPTIONS, **EXACT, num_gpu_blocks_override=50):
        plan, cache = seen[-1]
        numbers = 3 * (2 * 2 * 16 + 4 * 24) + 4 * 24 * 16
        assert plan.state_bytes == 3 * numbers * 4
        assert cache.by_layer[0][0, 0].numel() == numbers and cache.by_layer[0].dtype == torch.float32
        # Four groups of a layer each, of which a request has a block at least; no block is much larger.
        assert plan.num_tensors == 1 and plan.layer_block_bytes - numbers * 4 < 4 * 256
        assert plan.bytes_per_token == 2 * 2 * 16 * 4


@pytest.mark.parametrize("architecture", RECURRENT)
def test_each_rank_has_its_part_of_a_state(tmp_path, architecture):
    """As `octavo plan` counts it; of keys that ranks share each has a copy."""
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    options = OPTIONS | EXACT | {"num_gpu_blocks_override": 50}
    one, two = (
        plan_memory(resolve(EngineArgs(model=str(folder), **options, tensor_parallel_size=count)))
        for count in (1, 2)
    )
    is_shared = architecture == "GraniteMoeHybridForCausalLM"  # one group: in two layers, for three taps
    shared = 2 * 3 * (32 + 32) * 4 * is_shared
    assert 0 < two.state_bytes == (one.state_bytes + shared) // 2


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) == FIRST else pytest.mark.slow)
        for name in RECURRENT
        for kind in KINDS
    ],
)
def test_ranks_and_stages(tmp_path, architecture, kind):
    """Chunks, preemption and prefixes, too: the second time prompts are found."""
    oracle = make_oracle(tiny_config(architecture))
    folder = save(oracle, tmp_path)
    num_blocks = max(200, 8 * BLOCKS.get(architecture, 0))
    options = {"num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 48, kind: 2}
    with LLM(str(folder), **OPTIONS, **EXACT, **options) as llm:
        for _ in range(2):
            assert not wrong_outputs(oracle, llm, make_prompts(131, LENGTHS))
        assert metrics(llm)["vllm:prefix_cache_hits"] > 0


DRAFTS = {"method": "suffix", "num_speculative_tokens": 4, "enable_adaptive_verification": False}
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=64, ignore_eos=True, detokenize=False)


MODES = {"one step": RECURRENT, "two in flight": ["Qwen3NextForCausalLM"], "chained": RECURRENT}
MODES["blind"] = ["Qwen3NextForCausalLM"]
QUICK = {("one step", "FalconH1ForCausalLM"), ("chained", "Lfm2ForCausalLM")}
QUICK |= {("chained", "Qwen3NextForCausalLM"), ("blind", "Qwen3NextForCausalLM")}


@pytest.mark.parametrize(
    ("mode", "architecture"),
    [
        pytest.param(mode, name, marks=[] if (mode, name) in QUICK else pytest.mark.slow)
        for mode, names in MODES.items()
        for name in names
    ],
)
def test_drafts_change_no_bit(tmp_path, monkeypatch, mode, architecture):
    """Most come true the second time, as suffixes of all outputs are known; blind: each row is a request."""
    folder = save(make_oracle(tiny_config(architecture)), tmp_path)
    if mode in ("chained", "blind"):
        monkeypatch.setattr(CPUPlatform, "graph_capture", lambda platform: lambda work: work)
    params = [params.clone() for params in (GREEDY, DRAWN) for _ in LENGTHS]
    for each in params:
        each.logprobs = 1 if mode == "one step" else None
    options = OPTIONS | EXACT | {"mamba_block_size": 16, "num_gpu_blocks_override": 1000}
    options |= {"steps_in_flight": 1 if mode == "one step" else 2, "max_num_seqs": 64}

    def texts(llm):
        outputs = llm.generate(make_prompts(131, LENGTHS) * 2, params, use_tqdm=False)
        return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]

    with LLM(str(folder), **options) as llm:
        plain = texts(llm)
    if mode == "blind":
        states = Recurrent.states
        monkeypatch.setattr(
            Recurrent, "states", lambda layer, batch: states(layer, batch)._replace(num_drafts=0)
        )
    with LLM(str(folder), **options, speculative_config=DRAFTS) as llm:
        for _ in range(2):
            assert (texts(llm) == plain) or mode == "blind"
        seen = metrics(llm)
        assert (texts(llm) == plain) == (mode != "blind")
    guessed, accepted = (seen[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert mode == "blind" or guessed > accepted > 150


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size=3 does not divide"),
    ],
)
def test_what_is_refused(tmp_path, options, error, text):
    folder = save(make_oracle(tiny_config("Lfm2ForCausalLM")), tmp_path)
    with pytest.raises(error, match=text):
        LLM(str(folder), **OPTIONS | options)


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)])
def test_drafts_over_ranks_and_stages(tmp_path, kind):
    """Each rank's states pass what came true; the second time all outputs are known."""
    oracle = make_oracle(tiny_config("Qwen3NextForCausalLM"))
    options = {"num_gpu_blocks_override": 400, "mamba_block_size": 16, kind: 2, "speculative_config": DRAFTS}
    with LLM(str(save(oracle, tmp_path)), **OPTIONS | EXACT | options) as llm:
        for _ in range(2):
            assert not wrong_outputs(oracle, llm, make_prompts(131, LENGTHS))
        assert metrics(llm)["vllm:spec_decode_num_accepted_tokens"] > 100


def test_drafts_and_preemption(tmp_path):
    """Blocks that are swapped out have the states, and the inputs of drafts that these have yet to pass."""
    oracle = make_oracle(tiny_config("Qwen3NextForCausalLM"))
    options = {
        "num_gpu_blocks_override": 30,
        "max_num_batched_tokens": 24,
        "mamba_block_size": 8,
        "swap_space": 0.01,
    }
    with LLM(str(save(oracle, tmp_path)), **OPTIONS | EXACT | options, speculative_config=DRAFTS) as llm:
        for _ in range(2):
            assert not wrong_outputs(oracle, llm, make_prompts(131, LENGTHS))
        seen = metrics(llm)
    assert seen["vllm:num_preemptions"] > 0 and seen["vllm:num_blocks_swapped_in"] > 0
    assert seen["vllm:spec_decode_num_accepted_tokens"] > 100


def test_a_draft_model_with_states_is_refused(tmp_path):
    folder = str(save(make_oracle(tiny_config("Lfm2ForCausalLM")), tmp_path))
    with pytest.raises(Unsupported, match="cannot have recurrent layers"):
        LLM(folder, **OPTIONS, speculative_config={"method": "draft_model", "model": folder})
