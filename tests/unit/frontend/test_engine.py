"""LLMEngine and LLM over a FakeExecutor: requests, ids, verbs, metrics, without torch."""

import dataclasses

import pytest

from octavo import LLM, BeamSearchParams, LLMEngine, RequestError, SamplingParams, Unsupported
from octavo.config import FrontConfig
from octavo.lora.request import LoRARequest
from octavo.metrics import Counter
from octavo.metrics.names import PREFIX
from tests.fakes import ByteTokenizer, expected_output, fake_request
from tests.process_fakes import process_config

PARAMS = SamplingParams(max_tokens=8, seed=5, detokenize=False)


@pytest.fixture
def make_engine(monkeypatch):
    """An engine whose executor is the fake one."""
    monkeypatch.setattr("octavo.frontend.engine.tokenizer_for", lambda config: ByteTokenizer())
    opened = []

    def make(**front):
        opened.append(LLMEngine(dataclasses.replace(process_config(), front=FrontConfig(**front))))
        return opened[-1]

    yield make
    for engine in opened:
        engine.shutdown()
        engine.shutdown()


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def llm(engine, monkeypatch):
    monkeypatch.setattr(LLMEngine, "from_engine_args", classmethod(lambda cls, args: engine))
    return LLM("fake")


def finish(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    return outputs


def expected(ids, params=PARAMS):
    request = fake_request("", ids, params.max_tokens, seed=params.seed, sampling=params)
    return expected_output(request, 64)[0]


def test_forms_of_a_request(engine):
    ids = [
        engine.add_request("text", "hello", PARAMS),
        engine.add_request("ids", [104, 105], PARAMS),
        engine.add_request(None, {"prompt_token_ids": [1, 2]}, PARAMS),
        engine.add_request("early", prompt_token_ids=[3, 4], sampling_params=PARAMS, lora_request=None),
        engine.add_request(
            "both", "text of it", prompt_token_ids=[5], sampling_params=PARAMS, arrival_time=1.0
        ),
    ]
    assert ids[:2] + ids[3:] == ["text", "ids", "early", "both"]
    assert ids[2]
    assert engine.get_num_unfinished_requests() == 5
    outputs = finish(engine)
    prompts = [list(b"hello"), [104, 105], [1, 2], [3, 4], [5]]
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert outputs[request_id].outputs[0].token_ids == expected(prompt)
    assert (outputs["both"].prompt, outputs["both"].prompt_token_ids) == ("text of it", [5])


def test_neither_prompt_nor_ids(engine):
    for arguments in ({}, {"prompt": {}}):
        with pytest.raises(ValueError, match=r"Either prompt or prompt_token_ids must be provided\."):
            engine.add_request("r", **arguments)
    assert not engine.has_unfinished_requests()


def test_what_a_request_cannot_have(engine):
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest or a LoRASum, got object"):
        engine.add_request("r", "p", PARAMS, lora_request=object())
    with pytest.raises(RequestError, match="Got lora_request 'a' but LoRA is not enabled"):
        engine.add_request("r", "p", PARAMS, lora_request=LoRARequest("a", 1, "/nowhere"))


def test_vllms_other_names_of_an_adapter():
    adapter = LoRARequest("a", 1, "/nowhere")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("a", 1, "/nowhere")


def test_abort_is_idempotent(engine):
    engine.add_request("a", [1], PARAMS)
    engine.add_request("a", [2], PARAMS)
    engine.add_request("b", [3], PARAMS)
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["a", "never heard of"])
    assert list(finish(engine)) == ["b"]
    engine.abort_request("b")
    assert (engine.stats.num_running, engine.stats.num_blocks_used) == (0, 0)


def test_strict_ids(make_engine):
    engine = make_engine(strict_request_ids=True)
    engine.add_request("a", [1], PARAMS)
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", [2], PARAMS)
    finish(engine)
    engine.add_request("a", [2], PARAMS)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_modes_of_a_pause(engine, mode):
    engine.add_request("a", [1], PARAMS)
    engine.step()
    engine.pause_generation(mode)
    assert engine.is_paused()
    engine.add_request("b", [2], PARAMS)
    early = [] if mode == "keep" else engine.step()
    with pytest.raises(RequestError, match="paused or asleep"):
        engine.step()
    engine.resume_generation()
    assert not engine.is_paused()
    outputs = {output.request_id: output for output in early if output.finished} | finish(engine)
    completion = outputs["a"].outputs[0]
    if mode == "abort":
        assert (completion.token_ids, completion.finish_reason) == (expected([1])[:1], "abort")
    else:
        assert (completion.token_ids, completion.finish_reason) == (expected([1]), "length")
    assert outputs["b"].outputs[0].token_ids == expected([2])


def test_sleep_levels_and_tags(engine):
    engine.add_request("a", [1, 2, 3], PARAMS)
    engine.step()
    engine.sleep(2, mode="keep")
    assert engine.is_sleeping()
    assert sleep_state(engine) == "discard_all"
    with pytest.raises(RequestError, match="asleep"):
        engine.resume_generation()
    engine.wake_up(["weights"])
    assert engine.is_sleeping()
    engine.wake_up(["kv_cache"])
    assert not engine.is_sleeping()
    assert sleep_state(engine) == "awake"
    assert finish(engine)["a"].outputs[0].token_ids == expected([1, 2, 3])
    engine.sleep(0)
    assert engine.is_paused()
    assert not engine.is_sleeping()
    engine.wake_up(["scheduling"])
    assert not engine.is_paused()


def sleep_state(engine):
    [state] = [m.labels["sleep_state"] for m in engine.get_metrics() if "sleep_state" in m.labels and m.value]
    return state


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda engine: engine.sleep(3), "level must be 0, 1 or 2"),
        (lambda engine: engine.sleep(mode="now"), "mode must be one of abort, wait, keep"),
        (lambda engine: engine.wake_up(["eyes"]), "Unknown tags eyes. Known: weights"),
        (lambda engine: engine.start_profile(), "profiler_dir"),
        (lambda engine: engine.stop_profile(), "profiler_dir"),
        (lambda engine: engine.collective_rpc("echo", args=(1,)), "named arguments"),
        (lambda engine: engine.apply_model(id), "processes"),
    ],
)
def test_wrong_orders(engine, call, says):
    with pytest.raises(ValueError, match=says):
        call(engine)
    assert not engine.is_paused()


def test_commands_of_workers(engine):
    verb, arguments, _ = engine.collective_rpc("echo", kwargs={"a": 1})
    assert (verb, arguments) == ("echo", {"a": 1})
    assert engine.reset_prefix_cache(reset_running_requests=True) is True
    assert engine.reset_prefix_cache(reset_connector=True) is False, "there are no files"
    assert engine.reset_mm_cache() is None
    assert engine.reset_encoder_cache() is None
    assert engine.get_supported_tasks() == ("generate",)


def test_metrics_count_requests(engine):
    for i in range(5):
        engine.add_request(str(i), [1, 2, 3 + i], PARAMS)
    finish(engine)
    counters = {m.name.removeprefix(PREFIX): m.value for m in engine.get_metrics() if isinstance(m, Counter)}
    assert counters["prompt_tokens"] == 15
    assert counters["generation_tokens"] == 40
    assert counters["request_success"] == 5


def test_enqueue_and_wait(llm):
    first = llm.enqueue([[1], [2]], PARAMS)
    second = llm.enqueue_chat([{"role": "user", "content": "hi"}], PARAMS)
    between = llm.generate([[9]], PARAMS, use_tqdm=False)
    assert between[0].outputs[0].token_ids == expected([9])
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second
    assert [output.outputs[0].token_ids for output in outputs[:2]] == [expected([1]), expected([2])]
    assert outputs[2].prompt == "user: hi\nassistant:"
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert llm._finished == {}


def test_generate_while_asleep(llm):
    waiting = llm.enqueue([[1], [2]], PARAMS)
    llm.sleep(mode="keep")
    with pytest.raises(RequestError, match="wake_up"):
        llm.generate([[3]], PARAMS, use_tqdm=False)
    llm.wake_up()
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == waiting
    assert [output.outputs[0].token_ids for output in outputs] == [expected([1]), expected([2])]


def test_sleep_ends_what_was_enqueued(llm):
    llm.enqueue([[1], [2]], PARAMS)
    llm.sleep()
    assert [o.outputs[0].finish_reason for o in llm.wait_for_completion(use_tqdm=False)] == ["abort"] * 2


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, PARAMS, "prompts must be a text, token ids, .* got NoneType"),
        (b"abc", PARAMS, "prompts must be .* got bytes"),
        (7, PARAMS, "prompts must be .* got int"),
        ([[1]], {"temperature": 0}, "sampling_params must be SamplingParams or a list of them, got dict"),
        ([[1]], ["greedy"], "sampling_params must be .* got str"),
    ],
)
def test_what_is_no_prompt_or_no_params(llm, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    with pytest.raises(RequestError, match="messages must be a list of messages, or of such lists, got dict"):
        llm.chat({"role": "user", "content": "hi"})


def test_the_bar_moves_with_tokens_before_a_prompt_is_done(llm, monkeypatch):
    monkeypatch.setattr("octavo.frontend.observe.progress._REFRESH_S", 0.0)
    told = []

    class Bar:
        def __init__(self, **_):
            pass

        def set_postfix_str(self, text, refresh):
            told.append((int(text.split()[0]), refresh))

        def update(self, count):
            told.append("done")

        def close(self):
            pass

    llm.generate([[1], [2]], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=Bar, priority=1)
    counts = [each[0] for each in told if each != "done"]
    before = [each[0] for each in told[: told.index("done") - 1]]
    assert counts == sorted(counts) and len(before) >= 4 and 0 < before[1] < 12
    assert told[-1] == "done" and told[-2] == (12, False)


def test_a_bar_that_fails_leaves_nothing_behind(llm):
    def bar(**_):
        raise ValueError("no bar")

    with pytest.raises(ValueError, match="no bar"):
        llm.generate([[1], [2]], PARAMS, use_tqdm=bar)
    assert not llm.llm_engine.has_unfinished_requests()


def test_attributes(llm, engine):
    assert llm.llm_engine is engine
    assert llm.engine_class is LLMEngine
    assert llm.model_config is engine.model_config
    assert next(llm.request_counter) == 0
    assert llm.default_sampling_params == SamplingParams()
    assert llm.get_world_size() == 1
    assert {type(m).__name__ for m in llm.get_metrics()} == {"Counter", "Gauge", "Histogram"}


@pytest.mark.parametrize("method", ["encode", "embed", "classify", "reward"])
def test_pooling_needs_a_pooling_model(llm, method):
    with pytest.raises(RequestError, match="only supported for pooling models"):
        getattr(llm, method)("text")
    with pytest.raises(RequestError, match="does not support the Scoring API"):
        llm.score("text", "text")


def test_what_prompts_cannot_have(llm):
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.generate(["a", "b"], PARAMS, lora_request=[None, object()])
    with pytest.raises(RequestError, match=r"lengths of prompts \(1\) and lora_request \(2\)"):
        llm.generate(["a"], PARAMS, lora_request=[None, None])
    with pytest.raises(RequestError, match="text only"):
        llm.generate(["a"], PARAMS, mm_processor_kwargs={"a": 1})
    assert llm.generate([[1]], PARAMS, lora_request=[None], use_tqdm=False)[0].finished


def test_tenants_and_deadlines_of_all_that_is_started(llm, monkeypatch):
    sent = []
    add = llm.llm_engine.core.client.add
    monkeypatch.setattr(
        llm.llm_engine.core.client, "add", lambda request: sent.append(request) or add(request)
    )
    standing = {"tenant": ["a", "b"], "deadline_s": [1.0, None]}
    talk = [{"role": "user", "content": "x"}]
    template = ByteTokenizer.CHAT_TEMPLATE
    llm.enqueue(["p", "q"], PARAMS, **standing)
    llm.enqueue_chat([talk, talk], PARAMS, chat_template=template, **standing)
    assert len(llm.wait_for_completion(use_tqdm=False)) == 4
    llm.chat([talk, talk], PARAMS, chat_template=template, use_tqdm=False, **standing)
    assert [request.standing.tenant for request in sent] == ["a", "b"] * 3
    assert [request.standing.due_s is None for request in sent] == [False, True] * 3
    for start in (llm.generate, llm.enqueue):
        with pytest.raises(RequestError, match=r"lengths of prompts \(1\) and tenant \(2\)"):
            start("p", PARAMS, tenant=["a", "b"])
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.beam_search("p", BeamSearchParams(2, 4), lora_request=object())


def test_what_a_beam_search_cannot_have():
    with pytest.raises(RequestError, match="structured_outputs cannot be used with beam search"):
        BeamSearchParams(2, 4, structured_outputs={"regex": "a"})
    with pytest.raises(Unsupported, match="watermarking is not supported"):
        BeamSearchParams(2, 4, watermarking=5)
