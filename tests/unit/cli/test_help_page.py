"""`--help=WORD` shows the part of the help that the word names."""

import pytest

from octavo.cli.main import main


@pytest.fixture
def help_of(capsys):
    def show(word, command="generate"):
        assert main([command, f"--help={word}"]) == 0
        return capsys.readouterr().out

    return show


def test_groups(help_of):
    lines = help_of("listgroup", "serve").splitlines()
    assert [line.split()[0] for line in lines] == [
        *("positional", "options", "server", "ModelConfig", "CacheConfig"),
        *("SchedulerConfig", "ParallelConfig", "FrontConfig", "LoRAConfig"),
        *("MediaConfig", "ObservabilityConfig"),
    ]
    assert lines[5].endswith("Bounds of one step and the order of waiting requests.")


def test_a_group_an_option_a_part_of_a_name(help_of):
    group = help_of("SchedulerConfig")
    assert "--max-num-seqs" in group and "--block-size" not in group
    assert help_of("schedulerconfig") == group
    one = help_of("max_num_seqs")
    assert "--max-num-seqs N" in one and "--max-num-batched-tokens" not in one
    assert help_of("--max-num-seqs") == one
    assert "--model TEXT" in help_of("model") and "--max-model-len" not in help_of("model")
    part = help_of("offload")
    assert "--cpu-offload-gb" in part and "--offload-group-size" in part and "--model " not in part


def test_everything(help_of):
    whole = help_of("all")
    assert help_of("page") == whole and "--max-num-seqs" in whole and "--stream-interval" in whole
    assert "--kv-offloading-size" not in whole, "other names are taken, not shown"


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "complete", "run-batch", "plan"])
def test_help_alone_begins_with_examples_and_fits_two_screens(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: octavo {command} [" in text and f"\nexamples:\n  octavo {command}" in text
    assert "--model TEXT" in text and "--stream-interval" not in text
    assert f"`octavo {command} --help=all` shows all options" in text and "SchedulerConfig" in text
    assert len(text.splitlines()) < 80


def test_short_commands_show_all_at_once(capsys):
    assert main(["pull", "-h"]) == 0
    text = capsys.readouterr().out
    assert "--download-dir" in text and "octavo pull smollm2" in text


def test_unknown_words_are_refused(capsys):
    assert main(["chat", "--help=nothing"]) == 2
    assert "names no group or option of octavo chat. Groups: " in capsys.readouterr().err
