"""The offline API on the real default model: what a user sees."""

import pytest

from octavo import LLM, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(str(smollm2_path), max_model_len=1024, kv_cache_memory_bytes=1 << 28) as llm:
        yield llm


def test_it_knows_the_capital_of_france(llm):
    [output] = llm.chat(FRANCE, GREEDY, use_tqdm=False)
    [completion] = output.outputs
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    assert completion.stop_reason is None
    assert output.finished
    assert output.prompt.endswith("<|im_start|>assistant\n")
    assert llm.get_tokenizer().decode(completion.token_ids) == completion.text


def test_prompt_forms_agree(llm):
    text = "The sky is"
    ids = llm.get_tokenizer().encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].text == outputs[0].outputs[0].text
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4


def test_parameters_per_prompt(llm):
    short, long = SamplingParams(max_tokens=2, temperature=0), SamplingParams(max_tokens=9, temperature=0)
    outputs = llm.generate(["Once upon a time", "Once upon a time"], [short, long], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 9]
    assert outputs[1].outputs[0].text.startswith(outputs[0].outputs[0].text)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


def test_stop_strings(llm):
    wanted = SamplingParams(temperature=0, max_tokens=24, stop=["Paris"])
    [output] = llm.chat(FRANCE, wanted, use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is "
    assert output.outputs[0].stop_reason == "Paris"
    wanted.include_stop_str_in_output = True
    [output] = llm.chat(FRANCE, wanted, use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris"


def test_logprobs(llm):
    wanted = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate(["The capital of France is"], wanted, use_tqdm=False)
    [completion] = output.outputs
    assert len(completion.logprobs) == 5
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(position)) == token_id
        assert position[token_id].rank == 1
        assert len(position) == 3
    total = sum(p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert token_id in position


def test_the_same_seed_gives_the_same_text(llm):
    wanted = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=3, max_tokens=16)
    first, second = llm.generate(["Once upon a time"] * 2, wanted, use_tqdm=False)
    assert first.outputs[0].text == second.outputs[0].text
    other = SamplingParams(temperature=0.9, seed=4, max_tokens=16)
    assert llm.generate("Once upon a time", other, use_tqdm=False)[0].outputs[0].text != first.outputs[0].text


def test_a_bad_prompt_is_refused_before_anything_starts(llm):
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", ""], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="maximum context length is 1024"):
        llm.generate([[5] * 2000], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="out of vocabulary"):
        llm.generate([[10**6]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="lengths of prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert "Paris" in llm.chat(FRANCE, GREEDY, use_tqdm=False)[0].outputs[0].text


def test_no_blocks_leak(llm):
    llm.generate(["a", "b c", "d e f"], SamplingParams(n=2, seed=1, max_tokens=7), use_tqdm=False)
    assert llm.llm_engine.stats.num_blocks_used == 0
    assert llm.llm_engine.stats.num_running == llm.llm_engine.stats.num_waiting == 0


def test_several_conversations_and_default_parameters(llm):
    batch = [FRANCE, [{"role": "user", "content": "Say hello."}]]
    outputs = llm.chat(batch, GREEDY, use_tqdm=False)
    assert "Paris" in outputs[0].outputs[0].text
    assert outputs[1].outputs[0].text
    assert llm.get_default_sampling_params() == SamplingParams()
