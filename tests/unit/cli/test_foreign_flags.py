"""A command line or config file written for vLLM: every option is known, taken or refused with its reason."""

import argparse
import logging

import pytest

from octavo.base.errors import ConfigError
from octavo.cli import run_batch, serve
from octavo.cli.argv import expand_config, normalise
from octavo.cli.flags import add_engine_flags, engine_args
from octavo.cli.units import any_value
from octavo.config import EngineArgs
from octavo.config.foreign import ALIASES, ENGINE, SERVER
from tests import vllm_options


def parse(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("prompt", nargs="?")
    add_engine_flags(parser)
    return engine_args(parser.parse_intermixed_args(expand_config(normalise(list(words)))))


@pytest.mark.parametrize("name", [*ENGINE, *ALIASES])
def test_every_name_is_a_hidden_flag(name, capsys):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_flags(parser)
    flag = "--" + name.replace("_", "-")
    assert f" {flag} " not in parser.format_help().replace("\n", " ")
    try:
        parse(flag, "1")
    except ConfigError as error:
        says = ENGINE[name].text if name in ENGINE else "cannot be read as"
        assert says in str(error)


@pytest.mark.parametrize("command", [serve, run_batch])
def test_vllms_flags_are_recognized(command):
    """With a value and, of switches, without one; and as keys of a YAML file."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    command.configure(parser)
    theirs = [*vllm_options.ENGINE, *(vllm_options.SERVER if command is serve else SERVER)]
    actions = parser._option_string_actions
    assert not {"--" + name.replace("_", "-") for name in theirs} - set(actions)
    assert {"-tp", "-pp", "-pcp", "-dp", "-dpn", "-dpr", "-dpl", "-dpa", "-dpp", "-dpb", "-ep"} < set(actions)


def test_a_file_with_options_of_vllm_is_read(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "moe_backend: triton\nlanguage_model_only: true\nnuma_bind: true\ndata_parallel_backend: mp\n"
        "model_loader_extra_config: {}\nmax-num-scheduled-tokens: 4k\nuse-tqdm-on-load: false\n"
    )
    assert parse("--config", str(path)) == EngineArgs(max_num_batched_tokens=4000)
    assert sorted(caplog.messages) == [
        "data_parallel_backend has no effect. There is one engine: start one per replica.",
        "moe_backend has no effect. Kernels are chosen by device and model.",
        "numa_bind has no effect. Processes are bound from outside: start octavo under numactl or taskset.",
    ]


def test_values_that_ask_for_nothing_pass(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    plain = parse()
    words = ["-pp", "1", "-dp=1", "-O3", "--no-enable-lora", "--cpu-offload-gb", "0"]
    assert (
        parse(*words, "--compilation-config", "{}", "--attention-backend=auto", "--hf-token", "None") == plain
    )
    assert not caplog.records
    assert parse("--cudagraph-capture-sizes", "1", "2", "4", "--enforce-eager") == parse("--enforce-eager")
    assert "cudagraph_capture_sizes has no effect. octavo chooses itself" in caplog.text
    assert parse("--enable-sleep-mode", "a prompt", "--max-lora-cls-labels", "64") == plain
    assert "max_lora_cls_labels has no effect" in caplog.text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-pcp", "2"], "prefill_context_parallel_size=2: "),
        (["--kv-events-config.publisher", "zmq"], r"kv_events_config={'publisher': 'zmq'}"),
        (["--kv-offloading-size", "much"], "kv_offloading_size='much' cannot be read as swap_space"),
        (["--worker-cls", "a.B"], "Name an Executor class"),
        (
            ["--device-ids", "0", "1"],
            r"device_ids=\[0, 1\]: Choose GPUs by the variable CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_refusals_say_why(words, says):
    with pytest.raises(ConfigError, match=says):
        parse(*words)


def test_other_names_of_the_same():
    assert parse("--async-scheduling").steps_in_flight == 2
    assert parse("--no-async-scheduling").steps_in_flight == 1
    assert parse("--kv-offloading-size", "2").swap_space == 2
    assert parse("--profiler-config.torch_profiler_dir", "/x").profiler_dir == "/x"
    assert parse("--profiler-config", "{}").profiler_dir == ""
    assert parse("--max-model-len", "auto").max_model_len == -1
    assert EngineArgs(max_model_len="auto").max_model_len == -1


def test_a_config_file_may_hold_them(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text(
        "enable_lora: false\ncompilation_config: {}\nasync-scheduling: true\nmax_model_len: auto\n"
    )
    assert parse("--config", str(path)) == EngineArgs(steps_in_flight=2, max_model_len=-1)
    path.write_text("enable_trace_replay: true\n")
    with pytest.raises(ConfigError, match="octavo keeps no trace"):
        parse("--config", str(path))


def test_dotted_flags_are_parts_of_an_object():
    args = parse(
        "--hf_overrides.rope_parameters.rope_theta=1e4",
        "--max-num-seqs",
        "3",
        "--hf-overrides.max_position_embeddings",
        "8k",
        "--hf-overrides.rope_parameters.rope_type",
        "default",
    )
    assert args.hf_overrides == {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "max_position_embeddings": 8000,
    }
    assert args.max_num_seqs == 3
    assert normalise(["--", "--a.b", "c"]) == ["--", "--a.b", "c"]
    assert normalise(["version 1.5", "-x.y"]) == ["version 1.5", "-x.y"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hf-overrides.a"], "--hf-overrides.a needs a value"),
        (["--a.b", "1", "--a.b.c", "2"], "--a.b.c: another"),
    ],
)
def test_wrong_dotted_flags(words, says):
    with pytest.raises(ConfigError, match=says):
        normalise(words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("1.5", 1.5),
        ("80g", 80 * 10**9),
        ("1GiB", 1 << 30),
        ("[1, 2]", [1, 2]),
        ('"8k"', "8k"),
        ("ngram", "ngram"),
        ("None", None),
        ("null", None),
    ],
)
def test_values_of_any_kind(text, value):
    assert any_value(text) == value
