"""Mistakes on the command line and in its file: one line that says what to do, and nothing is started."""

import pytest

from octavo import EngineArgs
from octavo.base.errors import ConfigError
from octavo.cli.main import main


def said(capsys, *words):
    """The one line."""
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("octavo: error: ")
    return err.removeprefix("octavo: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["serve", "--gpu-memory-utilisation", "0.5"],
            "unknown option --gpu-memory-utilisation. Did you mean --gpu-memory-utilization? "
            "`octavo serve --help=all` lists all options.",
        ),
        (
            ["chat", "--max_model_length=5"],
            "unknown option --max-model-length. Did you mean --max-model-len?",
        ),
        (["generate", "--qwertyuiop", "a"], "unknown option --qwertyuiop. `octavo generate --help=all`"),
        (["serve", "--dtype", "bfloat61"], "argument --dtype: 'bfloat61' is none of auto, float32, bfloat16"),
        (["serve", "--dtype", "bfloat61"], "Did you mean bfloat16?"),
        (["serve", "--max-num-seqs", "many"], "'many' is not a whole number like 4096, 8k"),
        (["serve", "--port"], "argument --port: expected one argument."),
        (["pull", "smollm2", "more"], "unexpected argument 'more'."),
        (["serve", "one", "--model", "two"], "'one' and --model 'two' name two models: give one of them."),
        (["plan", "one", "--model=two"], "'one' and --model 'two' name two models"),
        (["chat", "one", "--model", "two"], "'one' and --model 'two' name two models"),
        (["generate", "--max-tokens", "-5", "--model", "/no/such", "a"], "max_tokens must be"),
        (["chat", "--top-p", "7", "-q", "a", "--model", "/no/such"], "top_p must be"),
        (["generate", "--model", "smolm2", "a"], "Did you mean smollm2?"),
    ],
)
def test_one_line(words, says, capsys):
    assert says in said(capsys, *words)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: x\n\nmax_num_seq: 3\n", "line 3, max_num_seq: unknown option --max-num-seq. Did you mean"),
        ("# a remark\ndtype: int\n", "line 2, dtype: argument --dtype: 'int' is none of auto, float32"),
        ("port: many\n", "line 1, port: argument --port: 'many' is not a whole number"),
        ("port: [1, 2\n", "cannot be read"),
    ],
)
def test_a_wrong_entry_of_a_file_is_told_with_its_line(text, says, tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    err = main(["serve", "--config", str(path)]), capsys.readouterr().err
    assert err[0] == 2 and f"{path}" in err[1] and says in err[1] and "usage" not in err[1]


def test_a_file_and_a_command_line_may_name_two_models(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("model: one\n")
    assert "'/no/such'" in said(capsys, "plan", "/no/such", "--config", str(path))


def test_a_wrong_keyword_has_its_neighbour():
    with pytest.raises(
        ConfigError, match=r"Unknown option max_num_seq\. Known: .*\. Did you mean max_num_seqs\?"
    ):
        EngineArgs(max_num_seq=3)
