"""Steps replayed from recorded calls, as a CPU does them, give the bits of ordinary steps."""

import pytest

from octavo import SamplingParams
from octavo.runtime.heads.token import TokenHead
from octavo.runtime.kernels.cpu import call_recorder
from octavo.runtime.kernels.cpu.library import Library, Products, load_library
from octavo.runtime.kernels.cpu.table import _CompiledKernels as CPUKernels
from octavo.runtime.kernels.ref.cache import cut_chunks
from octavo.runtime.kernels.sampling import Choice
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.worker import recorded_calls
from octavo.runtime.worker.recorded_calls import RecordedCalls
from tests.integration.test_invariance import params, prompts, tokens
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.matrix(6)


@pytest.fixture(autouse=True)
def short_prompts_are_recorded(monkeypatch):
    monkeypatch.setattr(recorded_calls, "_FEWEST_TOKENS", 2)


@pytest.fixture
def tries(monkeypatch):
    """Of how many tokens the steps were that were to be recorded."""
    tried, record = [], RecordedCalls._record_forward

    def counted(steps, batch, end):
        tried.append(len(batch.positions))
        return record(steps, batch, end)

    monkeypatch.setattr(RecordedCalls, "_record_forward", counted)
    return tried


@pytest.fixture
def repeats(monkeypatch):
    """How many steps were replayed."""
    count, replay = [0], Library.replay

    def counted(library, log):
        count[0] += 1
        replay(library, log)

    monkeypatch.setattr(Library, "replay", counted)
    return count


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory):
    """Norms of heads."""
    return save(make_oracle(tiny_config("Qwen3ForCausalLM")), tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture(scope="module")
def tiny_deepseek(tmp_path_factory):
    """Latent attention; experts, of which all tokens share some."""
    return save(make_oracle(tiny_config("DeepseekV3ForCausalLM")), tmp_path_factory.mktemp("tiny-deepseek"))


@pytest.fixture(scope="module")
def tiny_granite(tmp_path_factory):
    """States; torch multiplies embeddings and what layers give."""
    return save(
        make_oracle(tiny_config("GraniteMoeHybridForCausalLM")), tmp_path_factory.mktemp("tiny-granite")
    )


@pytest.fixture(scope="module")
def tiny_falcon(tmp_path_factory):
    """States beside attention, whose sum torch makes."""
    return save(make_oracle(tiny_config("FalconH1ForCausalLM")), tmp_path_factory.mktemp("tiny-falcon"))


@pytest.fixture(scope="module")
def tiny_gpt2(tmp_path_factory):
    """Layer norms; torch adds positions and the residual stream."""
    return save(make_oracle(tiny_config("GPT2LMHeadModel")), tmp_path_factory.mktemp("tiny-gpt2"))


@pytest.fixture(scope="module")
def tiny_apertus(tmp_path_factory):
    """An activation with learned slopes."""
    return save(make_oracle(tiny_config("ApertusForCausalLM")), tmp_path_factory.mktemp("tiny-apertus"))


@pytest.fixture(scope="module")
def tiny_llama4(tmp_path_factory):
    """Attention in chunks of 32 tokens."""
    return save(make_oracle(tiny_config("Llama4ForCausalLM")), tmp_path_factory.mktemp("tiny-llama4"))


@pytest.fixture(
    params=[
        "tiny_llama",
        "tiny_gemma3",
        "tiny_qwen3",
        "tiny_deepseek",
        "tiny_granite",
        "tiny_falcon",
        "tiny_gpt2",
        "tiny_apertus",
        "tiny_llama4",
    ]
)
def folder(request):
    return request.getfixturevalue(request.param)


def scored(llm, work, count):
    """Tokens with their logprobs: equal floats mean equal logits."""
    wanted = [
        SamplingParams(max_tokens=5 + 5 * (i % 5), temperature=i % 2, seed=i, logprobs=2, ignore_eos=True)
        for i in range(count)
    ]
    outputs = llm.generate(work, wanted, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_threads": 1},
        {"cpu_threads": 2, "max_num_seqs": 5, "max_num_batched_tokens": 40},
        {"num_gpu_blocks_override": 115, "block_size": 4, "max_model_len": 140},
        {"steps_in_flight": 2},
    ],
    ids=["one_thread", "few_seats", "preemption", "overlapped"],
)
def test_recorded_equals_eager(folder, make_llm, repeats, options):
    work = prompts(12, shared=20)
    llm = make_llm(folder, **options)
    recorded = scored(llm, work, 12)
    assert repeats[0] > 20, "hardly a step was repeated"
    if "block_size" in options and not folder.name.startswith(("tiny-granite", "tiny-falcon", "tiny-llama4")):
        assert llm.llm_engine.stats.num_preemptions > 0
    repeated = repeats[0]
    assert recorded == scored(make_llm(folder, cpu_threads=2, enforce_eager=True), work, 12)
    assert repeats[0] == repeated


def test_what_was_recorded_ends_with_weights_and_cache(tiny_llama, make_llm, repeats):
    work, wanted = prompts(3), params(3)
    llm = make_llm(tiny_llama)
    expected = tokens(llm, work, wanted)
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens(llm, work, wanted) == expected


@pytest.mark.parametrize("scored", [False, True], ids=["last_row", "all_rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_are_recorded_to_the_bit(folder, make_llm, repeats, scored, dtype):
    work = [prompt * 2 for prompt in prompts(9)]
    wanted = SamplingParams(max_tokens=1, temperature=0, logprobs=2, prompt_logprobs=2 if scored else None)
    options = {"dtype": dtype, "max_num_batched_tokens": 150}

    def outputs(**how):
        results = make_llm(folder, **options, **how).generate(work, wanted, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.prompt_logprobs) for o in results]

    expected = outputs(enforce_eager=True)
    assert repeats[0] == 0
    assert outputs() == expected
    assert repeats[0] >= 3


def test_steps_without_room_are_not_tried_again(tiny_llama, make_llm, tries, repeats, monkeypatch):
    work = [[7] * 90, [8] * 90, [9] * 4, [10] * 91]
    wanted = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, logprobs=2)

    def outputs():
        llm = make_llm(tiny_llama)
        results = [llm.generate([prompt], wanted, use_tqdm=False)[0].outputs[0] for prompt in work]
        return [(o.token_ids, o.logprobs) for o in results]

    expected = outputs()
    assert tries == [1, 90, 90, 4, 91]
    tries.clear()
    monkeypatch.setattr(call_recorder, "_BYTES", 72 << 10)
    assert outputs() == expected
    assert tries == [1, 90, 4]


def test_a_model_that_computes_with_torch_is_left_alone(tiny_llama4, make_llm, tries, repeats, monkeypatch):
    work, wanted = prompts(3), params(3)
    expected = tokens(make_llm(tiny_llama4, enforce_eager=True), work, wanted)
    monkeypatch.setattr(CPUKernels, "cut_chunks", staticmethod(cut_chunks))
    assert tokens(make_llm(tiny_llama4), work, wanted) == expected
    assert (tries, repeats[0]) == ([1], 0)


def test_greedy_tokens_are_part_of_the_recording(smollm2_path, make_llm, monkeypatch):
    """Where a kernel chooses them, from the head as it is packed; else the recording ends before the head.

    Those of rows that fill a recording up (nine become twelve) are left out.
    """
    chosen, choose = [], TokenHead.finish

    def noted(head, step, computed, pending):
        chosen.append((len(computed.work.samples), isinstance(computed.hidden, Choice)))
        choose(head, step, computed, pending)

    monkeypatch.setattr(TokenHead, "finish", noted)
    work = prompts(9, shared=4)
    wanted = [SamplingParams(max_tokens=6 + number, temperature=0, ignore_eos=True) for number in range(9)]

    def made(**options):
        chosen.clear()
        return tokens(make_llm(smollm2_path, activations="bfloat16", **options), work, wanted)

    recorded, library = made(), load_library()
    has_kernel = library is not None and library.bfloat16_products is Products.TILES
    assert dict(chosen[3:]) == dict.fromkeys(range(1, 10), has_kernel)
    assert recorded == made(enforce_eager=True)
    assert not any(is_chosen for _, is_chosen in chosen)


@pytest.mark.parametrize("path", ["tiny_llama", "tiny_qwen3", "tiny_deepseek"])
def test_tokens_that_cannot_be_recorded_are_chosen_behind(path, request, make_llm, monkeypatch, repeats):
    """The second recording of a step computes its own rotations, not those of the one that was refused."""

    def greedy(model, hidden):
        logits = model.logits(hidden)
        return logits.argmax(dim=1), logits.amax(dim=1)

    monkeypatch.setattr(Decoder, "greedy", greedy)
    path = request.getfixturevalue(path)
    work, wanted = prompts(3, shared=4), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    expected = tokens(make_llm(path, enforce_eager=True), work, wanted)
    assert (tokens(make_llm(path), work, wanted), repeats[0]) == (expected, 9)
