import argparse
import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.base.errors import ConfigError
from octavo.cli.argv import expand_config, normalise
from octavo.cli.flags import add_engine_flags, engine_args, json_object, whole_number
from octavo.config.args import EngineArgs


def parse(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_engine_flags(parser)
    return engine_args(parser.parse_args(expand_config(normalise(list(words)))))


def test_no_flags_are_the_defaults():
    assert parse() == EngineArgs()


def test_every_field_is_a_flag():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    help_text = " ".join(parser.format_help().split())
    for field in dataclasses.fields(EngineArgs):
        assert "--" + field.name.replace("_", "-") in help_text
        assert " ".join(field.metadata["explain"].split()[:4]) in help_text


def test_values_of_each_kind():
    args = parse(
        "--max-num-seqs=4",
        "--gpu_memory_utilization",
        "0.5",
        "--no-enable-prefix-caching",
        "--enforce_eager",
        "--dtype",
        "bfloat16",
        "--hf-overrides",
        '{"a_b": {"c": 1}}',
        "--kv_cache_memory_bytes=2GiB",
        "--max-model-len",
        "-1",
        "-tp",
        "2",
    )
    assert (args.max_num_seqs, args.gpu_memory_utilization, args.dtype) == (4, 0.5, "bfloat16")
    assert (args.enable_prefix_caching, args.enforce_eager) == (False, True)
    assert args.hf_overrides == {"a_b": {"c": 1}}
    assert (args.kv_cache_memory_bytes, args.max_model_len) == (2 << 30, -1)
    assert args.tensor_parallel_size == 2


def test_a_model_may_have_several_names():
    names = ["--served-model-name", "one", "two"]
    assert parse(*names, "--max-num-seqs=4").served_model_name == ["one", "two"]
    assert parse(names[0], "one").served_model_name == ["one"]


def test_values_keep_their_underscores():
    assert normalise(["--a_b=c_d", "e_f", "--", "--g_h"]) == ["--a-b=c_d", "e_f", "--", "--g_h"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--dtype", "int3"], "invalid choice"),
        (["--max-num-seqs", "many"], "not a whole number like"),
        (["--hf-overrides", "[1]"], "must be a JSON object"),
        (["--hf-overrides", "{"], "not JSON"),
    ],
)
def test_wrong_values_are_explained(words, says):
    with pytest.raises(argparse.ArgumentError, match=says):
        parse(*words)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-1", -1),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("2GB", 2 * 10**9),
        ("2GiB", 2 << 30),
        ("2giB", 2 << 30),
        ("1M", 1 << 20),
        ("3t", 3 * 10**12),
        ("7B", 7),
    ],
)
def test_human_numbers(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1e3", "0x10", "1 k", "1kk", "nan", "1.0001k"])
def test_not_whole_numbers(text):
    with pytest.raises(argparse.ArgumentTypeError):
        whole_number(text)


@given(st.integers(-(2**70), 2**70))
def test_plain_integers_are_exact(number):
    assert whole_number(str(number)) == number


def test_json_object():
    assert json_object('{"x": [1, null]}') == {"x": [1, None]}


def test_a_config_file_gives_flags_and_the_command_line_wins(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text(
        "max_num_seqs: 8\n"
        "max-num-batched-tokens: 8k\n"
        "enable_prefix_caching: false\n"
        "enforce-eager: true\n"
        "swap_space: 1.5\n"
        "hf_overrides: {vocab_size: 7}\n"
        "revision: null\n"
    )
    args = parse("--config", str(path))
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (8, 8000)
    assert (args.enable_prefix_caching, args.enforce_eager) == (False, True)
    assert math.isclose(args.swap_space, 1.5)
    assert args.hf_overrides == {"vocab_size": 7}
    assert parse("--config", str(path), "--max-num-seqs", "2").max_num_seqs == 2
    assert parse("--max_num_seqs", "2", f"--config={path}", "--no-enforce-eager").enforce_eager is False


def test_lists_become_repeated_flags(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("stop: [a, b]\n")
    assert expand_config(["--config", str(path)])[:2] == ["--stop=a", "--stop=b"]


@pytest.mark.parametrize(
    ("content", "says"),
    [("- 1\n- 2\n", "found a list"), ("a: [", "cannot be read"), (None, "cannot be read")],
)
def test_unreadable_config_files(tmp_path, content, says):
    path = tmp_path / "engine.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        expand_config(["--config", str(path)])


def test_an_empty_config_file_says_nothing(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("# nothing\n")
    assert parse("--config", str(path)) == EngineArgs()
