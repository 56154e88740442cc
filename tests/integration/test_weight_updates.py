"""Other weights in a running engine: all of them at once, or nothing changes."""

import json

import pytest
from safetensors.torch import load_file, save_file

from octavo import OctavoError, RequestError, SamplingParams
from tests.tiny_models import make_oracle, save, tiny_config

PROMPTS = [[i + 1] * (20 + i) for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)


def tokens(llm):
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Weights of the same architecture, with other numbers."""
    oracle = make_oracle(tiny_config("LlamaForCausalLM"), seed=1)
    return save(oracle, tmp_path_factory.mktemp("other"))


def test_outputs_are_those_of_an_engine_with_these_weights(tiny_llama, other, make_llm):
    """Cached prompts of before are not used; weights that were discarded come back as the new ones."""
    expected = tokens(make_llm(other))
    llm = make_llm(tiny_llama)
    before = tokens(llm)
    assert before != expected and llm.get_weight_version() == "default"
    llm.update_weights_from_disk(str(other), "step 7")
    assert tokens(llm) == expected and llm.get_weight_version() == "step 7"
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == expected
    llm.update_weights_from_disk(str(tiny_llama))
    assert tokens(llm) == before and llm.get_weight_version() == str(tiny_llama)


def test_open_requests_go_on_behind_what_they_have(tiny_llama, other, make_llm):
    llm, fresh = make_llm(tiny_llama), make_llm(other)
    llm.enqueue(PROMPTS, GREEDY)
    for _ in range(5):
        llm.llm_engine.step()
    llm.update_weights_from_disk(str(other))
    rest = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for prompt, output in zip(PROMPTS, llm.wait_for_completion(use_tqdm=False), strict=True):
        found = list(output.outputs[0].token_ids)
        [continued] = fresh.generate([prompt + found[:8]], rest, use_tqdm=False)
        assert found[8:] == list(continued.outputs[0].token_ids)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_changes_when_a_rank_cannot_load(tiny_llama, other, make_llm, tmp_path, size):
    llm = make_llm(tiny_llama, tensor_parallel_size=size)
    before = tokens(llm)
    weights = load_file(other / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OctavoError, match="lacks 1 weights"):
        llm.update_weights_from_disk(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 8}))
    with pytest.raises(OctavoError, match="hidden_size is 8, the model's is"):
        llm.update_weights_from_disk(str(tmp_path))
    with pytest.raises(OctavoError, match="holds neither"):
        llm.update_weights_from_disk(str(tmp_path / "nowhere"))
    assert tokens(llm) == before and llm.get_weight_version() == "default"
    llm.update_weights_from_disk(str(other))
    assert tokens(llm) != before


def test_not_while_the_engine_sleeps(tiny_llama, other, make_llm):
    llm = make_llm(tiny_llama)
    llm.sleep(1)
    with pytest.raises(RequestError, match="wake_up comes before new weights"):
        llm.update_weights_from_disk(str(other))
    llm.wake_up()
    assert tokens(llm)


def test_dummies_have_no_others(tiny_llama, other, make_llm):
    llm = make_llm(tiny_llama, load_format="dummy")
    with pytest.raises(OctavoError, match="load_format=dummy reads no weights"):
        llm.update_weights_from_disk(str(other))
