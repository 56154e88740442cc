"""The trace of requests: lengths, times, hashes of blocks; no text; one file of several processes."""

import dataclasses
import json
import os
import time

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.data_options import DataOptions
from octavo.bench.samples import load_samples
from octavo.frontend import engine as engine_module
from octavo.frontend.engine import LLMEngine
from octavo.frontend.observe.request_trace import BLOCK, RequestTrace
from octavo.messages.sampling import SamplingParams
from tests.fakes import ByteTokenizer
from tests.process_fakes import process_config

SECRET = "a secret of forty characters, and more ."
assert len(SECRET) == 40


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """Runs prompts, five tokens each; the lines that the engine wrote about them."""
    monkeypatch.setattr(engine_module, "tokenizer_for", lambda config: ByteTokenizer())

    def run(*prompts, **fields):
        config = process_config()
        path = tmp_path / "trace.jsonl"
        observability = dataclasses.replace(config.observability, record_trace=str(path))
        engine = LLMEngine(dataclasses.replace(config, observability=observability, **fields))
        try:
            for number, (prompt, options) in enumerate(prompts):
                engine.add_request(
                    str(number), prompt, SamplingParams(max_tokens=5, ignore_eos=True), **options
                )
            while engine.has_unfinished_requests():
                engine.step()
        finally:
            engine.shutdown()
        return [json.loads(line) for line in path.read_text().splitlines()]

    return run


def by_length(lines):
    return {line["input_length"]: line for line in lines}


def test_a_line_per_request_without_its_text(traced, tmp_path):
    lines = traced((SECRET, {}), (SECRET[:20], {}))
    assert sorted(line["input_length"] for line in lines) == [20, 40]
    assert {line["output_length"] for line in lines} == {5}
    assert all(0 <= line["timestamp"] < 100 for line in lines)
    assert all(len(line["hash_ids"]) == -(-line["input_length"] // BLOCK) for line in lines)
    text = (tmp_path / "trace.jsonl").read_text()
    assert set(lines[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert "secret" not in text and str(list(SECRET.encode()))[1:30] not in text
    assert (tmp_path / "trace.jsonl").stat().st_mode & 0o077 == 0


def test_blocks_are_equal_where_all_before_them_are(traced):
    other = "another start!!!" + SECRET[16:36]
    lines = by_length(
        traced((SECRET, {}), (SECRET[:33], {}), (other, {}), ({"prompt": SECRET[:35], "cache_salt": "x"}, {}))
    )
    whole, cut, changed, salted = (lines[n]["hash_ids"] for n in (40, 33, 36, 35))
    assert whole[:2] == cut[:2] and whole[2] != cut[2]
    assert not set(whole) & set(changed) and not set(whole) & set(salted)


def test_hashes_tell_nothing_without_the_key(traced, tmp_path):
    first = traced((SECRET, {}))[0]["hash_ids"]
    os.utime(tmp_path / "trace.jsonl", (1, 1))
    assert traced((SECRET, {}))[0]["hash_ids"] != first


def test_an_old_file_is_emptied_and_that_of_a_neighbour_is_not(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("old\n")
    os.utime(path, (1, 1))
    first = RequestTrace(path, time.time() - 1)
    assert path.read_text() == ""
    path.write_text("of the first\n")
    RequestTrace(path, time.time() - 1).close()
    assert path.read_text() == "of the first\n"
    first.close()
    first.close()
    with pytest.raises(ConfigError, match=r"record_trace '.*' cannot be written: No such file"):
        RequestTrace(tmp_path / "none" / "x", 0.0)


def test_the_trace_can_be_replayed(traced, tmp_path):
    lines = traced((SECRET, {}), (SECRET[:33], {}))
    options = DataOptions(dataset_name="timed_trace", dataset_path=str(tmp_path / "trace.jsonl"))
    samples = load_samples(options, ByteTokenizer())
    long, short = sorted(samples, key=lambda sample: -sample.prompt_len)
    assert (long.prompt_len, short.prompt_len, long.output_len) == (40, 33, 5)
    assert long.prompt[:32] == short.prompt[:32] and long.prompt[32:33] != short.prompt[32:]
    times = sorted(line["timestamp"] for line in lines)
    assert [sample.timestamp for sample in samples] == pytest.approx([0, times[1] - times[0]])
