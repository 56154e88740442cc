"""Adapters in recorded steps, as a GPU computes them; on a CPU a stand-in repeats the step."""

import pytest

from octavo import SamplingParams
from octavo.lora.request import LoRARequest
from octavo.runtime.lora.sites import AdapterSlots, Reach
from octavo.runtime.worker import recorded_calls
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from octavo.runtime.worker.recorded_calls import RecordedCalls
from tests import handmade_adapters, peft_adapters
from tests.integration.test_cuda_graphs import repeats, shapes
from tests.parity.test_lora import engine
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

__all__ = ["repeats", "shapes"]
UNTIED = {"tie_word_embeddings": False}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def work(base, tmp_path_factory):
    """Prompts and adapters, every third for the base."""
    folders = [tmp_path_factory.mktemp("adapters") / str(rank) for rank in (1, 4, 9, 33)]
    for index, folder in enumerate(folders):
        handmade_adapters.write(base[0], folder, int(folder.name), index)
    prompts = make_prompts(131, tuple(5 + 3 * i for i in range(12)))
    loras = [LoRARequest(f"a{i}", i + 1, str(folder)) for i, folder in enumerate(folders)]
    return prompts, [None if i % 3 == 2 else loras[i % 4] for i in range(12)]


def tokens(llm, prompts, loras):
    outputs = llm.generate(prompts, GREEDY, lora_request=loras, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [{}, {"steps_in_flight": 2, "max_num_seqs": 5}, {"max_num_batched_tokens": 70, "max_loras": 2}],
    ids=["plain", "few_seats", "few_slots"],
)
def test_captured_equals_eager(base, work, repeats, shapes, options):
    expected = tokens(engine(base[1], enforce_eager=True), *work)
    llm = engine(base[1], **options)
    shapes.clear()
    assert tokens(llm, *work) == expected
    assert {shape.reach for shape in shapes} >= {Reach.PRODUCTS}
    assert any(shape.chunks for shape in shapes if shape.reach), "prompts are recorded, too"
    assert any(not shape.chunks for shape in shapes if shape.reach)
    shapes.clear()
    tokens(llm, work[0], [None] * 12)
    assert {shape.reach for shape in shapes} == {Reach.NOTHING}, "steps of the base know nothing of adapters"


def test_experts_are_captured(tmp_path, repeats, shapes):
    """Beside rows of the base, and of an adapter that changes products alone."""
    oracle = make_oracle(tiny_config("Qwen3MoeForCausalLM"))
    for rank in (2, 9):
        handmade_adapters.write_experts(oracle, tmp_path / str(rank), rank, rank)
    handmade_adapters.write(oracle, tmp_path / "3", 3, 3)
    loras = [LoRARequest(rank, int(rank), str(tmp_path / rank)) for rank in "293"]
    folder, given = save(oracle, tmp_path / "base"), ([*loras, None] * 3)
    work = make_prompts(131, tuple(5 + 3 * i for i in range(12))), given
    expected = tokens(engine(folder, enforce_eager=True), *work)
    llm = engine(folder)
    plain = tokens(llm, work[0], [None] * 12)
    shapes.clear()
    assert tokens(llm, *work) == expected
    assert {(shape.reach, shape.chunks > 0) for shape in shapes} == {
        (Reach.EXPERTS, True),
        (Reach.EXPERTS, False),
    }
    assert [a == b for a, b in zip(plain, expected, strict=True)] == [lora is None for lora in given]
    shapes.clear()
    tokens(llm, work[0][:4], [loras[2]] * 4)
    assert {shape.reach for shape in shapes} == {Reach.PRODUCTS}, "what changes no expert does without"


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A base and work: PEFT's adapter of the head, one that leaves the head alone, the base."""
    folder, oracle = tmp_path_factory.mktemp("heads"), make_oracle(tiny_config("LlamaForCausalLM") | UNTIED)
    made = peft_adapters.adapt(oracle, target_modules=["q_proj", "lm_head"], scale=0.5)
    handmade_adapters.write(oracle, folder / "plain", 3, 3)
    loras = [
        LoRARequest("head", 1, peft_adapters.save(made, folder / "head")),
        LoRARequest("plain", 2, str(folder / "plain")),
    ]
    return save(oracle, folder / "base"), make_prompts(131, tuple(5 + 3 * i for i in range(12))), loras


def test_heads_are_captured(heads, repeats, shapes):
    """Chunks, too, of which each has one row of logits."""
    folder, prompts, loras = heads
    expected = tokens(engine(folder, enforce_eager=True), prompts, [*loras, None] * 4)
    llm = engine(folder, max_num_batched_tokens=70)
    assert tokens(llm, prompts, [*loras, None] * 4) == expected
    assert {(shape.reach, shape.chunks > 0) for shape in shapes} >= {(Reach.HEAD, True), (Reach.HEAD, False)}
    shapes.clear()
    assert tokens(llm, prompts[1:2], loras[1:]) == expected[1:2]
    assert {shape.reach for shape in shapes} == {Reach.PRODUCTS}


def test_rows_of_a_head_are_its_own(heads, repeats, monkeypatch):
    """The twin: with the slots of the step's first tokens, chunks begin with others."""
    folder, prompts, loras = heads
    expected = tokens(engine(folder, enforce_eager=True), prompts, [*loras, None] * 4)
    monkeypatch.setattr(AdapterSlots, "narrow", lambda slots, rows: None)
    assert tokens(engine(folder, max_num_batched_tokens=70), prompts, [*loras, None] * 4) != expected


def test_layers_are_recorded_before_a_changed_head(heads, monkeypatch):
    """On a CPU every step of one token is replayed up to the head."""
    folder, prompts, loras = heads
    expected, seen = tokens(engine(folder, enforce_eager=True), prompts, [*loras, None] * 4), []
    replay = RecordedCalls._replay

    def noted(calls, work, shape):
        seen.append(shape.reach)
        return replay(calls, work, shape)

    monkeypatch.setattr(RecordedCalls, "_replay", noted)
    assert tokens(engine(folder), prompts, [*loras, None] * 4) == expected
    assert len(seen) >= GREEDY.max_tokens - 1 and {*seen} == {Reach.HEAD}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A base and work: PEFT's adapters of embeddings, of whole ones and a whole head, of a layer's matrix."""
    folder, oracle = tmp_path_factory.mktemp("tables"), make_oracle(tiny_config("LlamaForCausalLM") | UNTIED)
    kinds = {
        "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        "layer": {"target_modules": ["q_proj"], "modules_to_save": ["o_proj"]},
    }
    models = [peft_adapters.adapt(oracle, seed=i, scale=0.5, **own) for i, own in enumerate(kinds.values())]
    loras = [
        LoRARequest(kind, i, peft_adapters.save(model, folder / kind))
        for i, (kind, model) in enumerate(zip(kinds, models, strict=True), 1)
    ]
    prompts = make_prompts(131, tuple(5 + 3 * i for i in range(12)))
    return save(oracle, folder / "base"), prompts, [*loras, None], [*models, oracle]


def said_by(model, prompt):
    """The oracle's greedy tokens."""
    ids = list(prompt)
    for _ in range(GREEDY.max_tokens):
        ids.append(int(peft_adapters.logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_tables_are_captured(tables, repeats, shapes):
    """What replaces a layer's matrix is asked for only by steps that have it."""
    folder, prompts, loras, models = tables
    llm = engine(folder, max_num_batched_tokens=70)
    found = tokens(llm, prompts, loras * 3)
    assert found == [said_by(model, prompt) for model, prompt in zip(models * 3, prompts, strict=True)]
    assert {(shape.reach, shape.chunks > 0) for shape in shapes} >= {
        (Reach.WHOLES, True),
        (Reach.WHOLES, False),
    }
    shapes.clear()
    assert tokens(llm, prompts[:2], loras[:2]) == found[:2]
    assert {shape.reach for shape in shapes} == {Reach.EMBEDDINGS}


def test_tables_are_recorded(tables, monkeypatch):
    """On a CPU steps with them are replayed, and long prompts are recorded."""
    folder, prompts, loras, models = tables
    seen, replay, record = [], RecordedCalls._replay, RecordedCalls._record_forward

    def noted(calls, work, shape):
        seen.append(shape.reach)
        return replay(calls, work, shape)

    def recorded(calls, batch, end):
        made = record(calls, batch, end)
        seen.append((len(batch.positions), made is not None))
        return made

    monkeypatch.setattr(RecordedCalls, "_replay", noted)
    monkeypatch.setattr(RecordedCalls, "_record_forward", recorded)
    monkeypatch.setattr(recorded_calls, "_FEWEST_TOKENS", 100)
    llm = engine(folder)
    found = tokens(llm, prompts, loras * 3)
    assert found == [said_by(model, prompt) for model, prompt in zip(models * 3, prompts, strict=True)]
    replayed = [entry for entry in seen if isinstance(entry, Reach)]
    assert len(replayed) >= GREEDY.max_tokens - 1 and {*replayed} == {Reach.WHOLES}
    seen.clear()
    (long,) = make_prompts(131, (150,))
    assert tokens(llm, [long], loras[1:2]) == [said_by(models[1], long)]
    assert (150, True) in seen and {Reach.EMBEDDINGS} == {entry for entry in seen if isinstance(entry, Reach)}


def test_misplaced_slots_show(base, work, repeats, monkeypatch):
    """The twin: slots that stand beside other tokens change what is said."""
    expected = tokens(engine(base[1], enforce_eager=True), *work)
    batch = CUDAGraphs._batch

    def misplaced(steps, inputs, shape):
        inputs.adapters.copy_(inputs.adapters.roll(1))
        return batch(steps, inputs, shape)

    monkeypatch.setattr(CUDAGraphs, "_batch", misplaced)
    assert tokens(engine(base[1]), *work) != expected
