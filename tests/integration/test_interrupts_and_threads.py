"""Ctrl-C inside `LLM.generate`, and several threads on one LLM: the engine stays usable."""

import signal
import threading
import time

import pytest

from octavo import LLM, SamplingParams

PROMPTS = [f"{number} small birds sat on a wall, and" for number in range(16)]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(str(smollm2_path), max_model_len=1024, kv_cache_memory_bytes=1 << 28) as llm:
        yield llm


@pytest.mark.slow
def test_sixteen_interrupts_leave_the_engine_usable(llm):
    [expected] = llm.generate("The sea is", SHORT, use_tqdm=False)
    main = threading.main_thread().ident
    for number in range(16):
        delay_s = 0.02 + 0.037 * number
        timer = threading.Timer(delay_s, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
        began = time.monotonic()
        [output] = llm.generate("The sea is", SHORT, use_tqdm=False)
        took_s = time.monotonic() - began
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert took_s < 2, took_s  # 0.2 s on a quiet machine


def test_an_interrupt_keeps_what_was_enqueued(llm):
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS[:4], SHORT, use_tqdm=False)]
    llm.enqueue(PROMPTS[:4], SHORT)
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == expected


def test_four_threads_share_an_engine(llm):
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SHORT, use_tqdm=False)]
    found, errors, most = {}, [], []
    step = llm.llm_engine.core.step

    def watched():
        outputs = step()
        most.append(llm.llm_engine.stats.num_running)
        return outputs

    def ask(number):
        try:
            for turn in range(3):
                mine = PROMPTS[number * 4 : number * 4 + 4]
                outputs = llm.generate(mine, SHORT, use_tqdm=False)
                found[number, turn] = [output.outputs[0].token_ids for output in outputs]
        except BaseException as error:
            errors.append(error)

    llm.llm_engine.core.step = watched
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    llm.llm_engine.core.step = step
    assert errors == []
    for number in range(4):
        for turn in range(3):
            assert found[number, turn] == expected[number * 4 : number * 4 + 4]
    assert max(most) > 4, "no step served requests of two threads"
