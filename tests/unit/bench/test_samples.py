"""Data sets: lengths, shared prefixes, files in their formats, and what is wrong with them."""

import json

import pytest

from octavo.base.errors import ConfigError
from octavo.bench.data_options import DataOptions
from octavo.bench.samples import load_samples
from tests.fakes import ByteTokenizer

TOKENIZER = ByteTokenizer()


def load(**options):
    return load_samples(DataOptions(**options), TOKENIZER)


def lines(path, *entries):
    path.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    return str(path)


def test_random_texts_have_their_lengths_and_are_the_same_for_a_seed():
    samples = load(num_prompts=20, input_len=30, output_len=10, random_range_ratio="0.5", random_prefix_len=7)
    assert len({sample.request_id for sample in samples}) == 20
    assert all(22 <= len(TOKENIZER.encode(s.prompt)) <= 52 and 5 <= s.output_len <= 15 for s in samples)
    assert len({s.prompt_len for s in samples}) > 3
    again = load(num_prompts=20, input_len=30, output_len=10, random_range_ratio="0.5", random_prefix_len=7)
    other = load(num_prompts=20, input_len=30, output_len=10, random_range_ratio="0.5", seed=1)
    assert [s.prompt for s in again] == [s.prompt for s in samples] != [s.prompt for s in other]
    one_sided = load(num_prompts=9, input_len=30, random_range_ratio='{"input": 0, "output": 0.5}')
    assert {s.prompt_len for s in one_sided} == {30} and len({s.output_len for s in one_sided}) > 1


def test_prefixes_are_shared():
    samples = load(
        dataset_name="prefix_repetition", num_prompts=12, prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=20, prefix_repetition_suffix_len=5,
    )  # fmt: skip
    assert len(samples) == 12 and {s.prompt_len for s in samples} == {25}
    begins = [s.prompt[:15] for s in samples]
    assert sorted(begins.count(b) for b in set(begins)) == [4, 4, 4]
    with pytest.raises(ConfigError, match="greater than or equal to num_prefixes"):
        load(dataset_name="prefix_repetition", num_prompts=2, prefix_repetition_num_prefixes=3)


def test_sharegpt(tmp_path):
    talks = [{"conversations": [{"value": "q" * n}, {"value": "a" * 10}]} for n in (2, 30, 3000)]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([*talks, {"conversations": [{"value": "alone"}]}]))
    [sample] = load(dataset_name="sharegpt", dataset_path=str(path), num_prompts=1)
    assert (sample.prompt, sample.output_len) == ("q" * 30, 10)
    drawn_again = load(dataset_name="sharegpt", dataset_path=str(path), num_prompts=3, sharegpt_output_len=2)
    assert [(s.prompt, s.output_len) for s in drawn_again] == [("q" * 30, 2)] * 3
    assert len(load(dataset_name="sharegpt", dataset_path=str(path), num_prompts=3, oversample=False)) == 1
    path.write_text('[{"conversations": [{"text": 1}, {}]}]')
    with pytest.raises(ConfigError, match='a turn needs "value"'):
        load(dataset_name="sharegpt", dataset_path=str(path))


def test_custom_lines(tmp_path):
    path = lines(
        tmp_path / "a.jsonl", {"prompt": "Hi", "output_tokens": 3}, {"prompt": "You", "output_tokens": 4}
    )
    options = {"dataset_name": "custom", "dataset_path": path, "num_prompts": 2, "disable_shuffle": True}
    [first, second] = load(**options, custom_output_len=-1)
    assert first.prompt == "user: Hi\nassistant:" and (first.output_len, second.output_len) == (3, 4)
    [first, _] = load(**options, skip_chat_template=True)
    assert (first.prompt, first.output_len) == ("Hi", 256)


def test_spec_bench_of_a_category(tmp_path):
    entries = [{"category": c, "turns": [f"{c}?", "more"]} for c in ("math", "writing", "math")]
    path = lines(tmp_path / "q.jsonl", *entries)
    options = {
        "dataset_name": "spec_bench",
        "dataset_path": path,
        "skip_chat_template": True,
        "num_prompts": 2,
    }
    assert [s.prompt for s in load(**options, spec_bench_category="math")] == ["math?", "math?"]


def test_burstgpt(tmp_path):
    path = tmp_path / "burst.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path.write_text(head + "1,GPT-4,12,7,19,x\n2,ChatGPT,5,5,10,x\n3,GPT-4,9,0,9,x\n")
    samples = load(dataset_name="burstgpt", dataset_path=str(path), num_prompts=3)
    assert [(len(TOKENIZER.encode(s.prompt)) >= 12, s.prompt_len, s.output_len) for s in samples] == [
        (True, 12, 7)
    ] * 3
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="line 2: not a row of BurstGPT"):
        load(dataset_name="burstgpt", dataset_path=str(path))


def test_equal_hashes_of_a_trace_are_equal_tokens(tmp_path):
    entry = {"timestamp": 2500, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}
    path = lines(
        tmp_path / "t.jsonl",
        entry,
        {**entry, "timestamp": 1000, "hash_ids": [1, 2, 9]},
        {**entry, "timestamp": 3000, "hash_ids": []},
    )
    first, second, bare = load(
        dataset_name="timed_trace", dataset_path=path, timed_trace_sec_multiplier=0.001
    )
    assert (first.timestamp, second.timestamp, bare.timestamp) == (0.0, 1.5, 2.0)
    assert len(first.prompt) == len(bare.prompt) == 40 and first.output_len == 3
    assert first.prompt[:32] == second.prompt[:32] and first.prompt[32:] != second.prompt[32:]
    assert bare.prompt[:16] != first.prompt[:16]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            {"timestamp": -1, "input_length": 4, "output_length": 3},
            "line 1: the time -1 must be finite and not",
        ),
        ({"timestamp": "x", "input_length": 4, "output_length": 3}, "needs a number 'timestamp'"),
        ({"timestamp": 1, "output_length": 3}, "needs a whole number 'input_length' of at least 1"),
        ({"timestamp": 1, "input_length": 4, "output_length": 0}, "'output_length' of at least 1, found 0"),
        ([1], "line 1: must be a JSON object"),
    ],
)
def test_bad_lines_of_a_trace(tmp_path, entry, text):
    path = lines(tmp_path / "t.jsonl", entry)
    with pytest.raises(ConfigError, match=text):
        load(dataset_name="timed_trace", dataset_path=path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        load(dataset_name="custom", dataset_path=str(tmp_path / "none.jsonl"))
    path = lines(tmp_path / "a.jsonl", {"text": "Hi"})
    with pytest.raises(ConfigError, match=r"line 1: needs a text 'prompt', found None; fields: \['text'\]"):
        load(dataset_name="custom", dataset_path=path)
    with pytest.raises(ConfigError, match="Only JSONL format"):
        load(dataset_name="custom", dataset_path=str(tmp_path / "a.csv"))
    with pytest.raises(ConfigError, match="must have a list of 'turns'"):
        load(dataset_name="spec_bench", dataset_path=path)
