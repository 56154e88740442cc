"""Activated LoRA against PEFT: what comes before the invocation is the base's, and shared with it."""

import json
from pathlib import Path

import pytest

from octavo import LoRASum, RequestError, SamplingParams
from octavo.lora.request import LoRARequest
from tests import peft_adapters
from tests.parity.test_lora import SCORED, check, engine, logits_of
from tests.tiny_models import make_oracle, make_prompts, save, tiny_config

INVOCATION = [7, 8, 9]
(TEXT, TAIL, OTHER) = make_prompts(131, (90, 5, 21))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
INVOKED = [*TEXT[:50], *INVOCATION, *TEXT[50:], *INVOCATION, *TAIL]
"""The tokens stand there twice: the last time counts."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    oracle = make_oracle(tiny_config("LlamaForCausalLM"))
    return oracle, save(oracle, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def activated(base, tmp_path_factory):
    model = peft_adapters.adapt(base[0], seed=1, alora_invocation_tokens=INVOCATION)
    return model, LoRARequest("activated", 1, peft_adapters.save(model, tmp_path_factory.mktemp("alora")))


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    model = peft_adapters.adapt(base[0], seed=2)
    return model, LoRARequest("plain", 2, peft_adapters.save(model, tmp_path_factory.mktemp("lora")))


@pytest.fixture(scope="module")
def llm(base):
    return engine(base[1])


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}])
def test_it_is_peft_s(base, activated, plain, options):
    """Whole and in chunks, in a batch with the base and with an adapter of all tokens."""
    llm = engine(base[1], **options)
    rows = [(INVOKED, activated), (INVOKED, (base[0], None)), (INVOKED, plain), ([*INVOCATION, 3], activated)]
    prompts, wanted = [prompt for prompt, _ in rows], [lora for _, (_, lora) in rows]
    outputs = llm.generate(prompts, SCORED, lora_request=wanted, use_tqdm=False)
    found = logits_of(outputs, 131)
    for output, logits, (_, (model, _)) in zip(outputs, found, rows, strict=True):
        check(model, output, logits)
    start = len(INVOKED) - len(TAIL) - len(INVOCATION)
    assert found[0][:start].equal(found[1][:start]), "the base's bits before"
    assert (found[0][start:-4] - found[1][start:-4]).abs().max() > 0.05, "and the adapter shows behind"


def test_without_the_position_it_is_not(base, activated, monkeypatch):
    """The twin: an adapter of all tokens is far off."""
    monkeypatch.setattr("octavo.frontend.requests.adapters._last_start", lambda *_: 0)
    (output,) = engine(base[1]).generate([INVOKED], SCORED, lora_request=activated[1], use_tqdm=False)
    with pytest.raises(AssertionError):
        check(activated[0], output, logits_of([output], 131)[0])


def test_the_base_s_prefix_is_shared(base, activated, plain, llm):
    """Base, then adapter, then base; nothing of what the adapter computed goes to the base."""

    def run(lora, model):
        (output,) = llm.generate([INVOKED], GREEDY, lora_request=lora, use_tqdm=False)
        expected = list(INVOKED)
        for _ in range(6):
            expected.append(int(peft_adapters.logits(model, expected)[-1].argmax()))
        assert output.outputs[0].token_ids == expected[-6:]
        return output.num_cached_tokens

    shared = (len(INVOKED) - len(TAIL) - len(INVOCATION)) // 16 * 16
    llm.reset_prefix_cache()
    assert run(None, base[0]) == 0
    assert run(activated[1], activated[0]) == shared
    assert run(activated[1], activated[0]) == len(INVOKED) // 16 * 16 > shared
    assert run(plain[1], plain[0]) == 0
    llm.reset_prefix_cache()
    assert run(activated[1], activated[0]) == 0
    assert run(None, base[0]) == shared


def test_several_samples(activated, llm):
    params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=8, ignore_eos=True)
    llm.reset_prefix_cache()
    first = llm.generate([INVOKED], params, lora_request=activated[1], use_tqdm=False)[0]
    again = llm.generate([INVOKED], params, lora_request=activated[1], use_tqdm=False)[0]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]


def test_what_cannot_be(activated, plain, llm, tmp_path):
    with pytest.raises(RequestError, match=r"has not the tokens \[7, 8, 9\] that activate the adapter"):
        llm.generate([OTHER], GREEDY, lora_request=activated[1], use_tqdm=False)
    both = LoRASum(((activated[1], 1.0), (plain[1], 1.0)))
    with pytest.raises(RequestError, match="cannot be scaled or added to others"):
        llm.generate([INVOKED], GREEDY, lora_request=both, use_tqdm=False)
    config = json.loads((Path(plain[1].lora_path) / "adapter_config.json").read_text())
    for change, text in (
        ({"alora_invocation_tokens": "abc"}, "must be token ids"),
        ({"alora_invocation_tokens": [1], "use_dora": True}, "is plain LoRA"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        (tmp_path / "adapter_model.safetensors").touch()
        with pytest.raises(RequestError, match=text):
            llm.generate([OTHER], GREEDY, lora_request=LoRARequest("x", 9, str(tmp_path)), use_tqdm=False)
