"""The script for shells, used as bash uses it."""

import subprocess

import pytest

from octavo.cli.main import main

_ASK = """
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _octavo; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "octavo.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path.read_text()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ser"], {"serve"}),
        (["serve", "--max-num-s"], {"--max-num-seqs"}),
        (["serve", "a-model", "--dtype", "b"], {"bfloat16"}),
        (["serve", "--no-strict-r"], {"--no-strict-request-ids"}),
        (["chat", "--dtype", "int8"], {""}),
        (["completion", ""], {"bash", "zsh"}),
        (["serve", "--moe-b"], {""}),
        (["ben"], {"bench"}),
        (["bench", "serv"], {"serve"}),
        (["bench", "serve", "--ramp-up-str"], {"--ramp-up-strategy"}),
        (["bench", "serve", "--ramp-up-strategy", "l"], {"linear"}),
    ],
)
def test_what_is_completed(script, words, completed):
    command = ["bash", "-c", script + _ASK, "bash", "octavo", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split("\n")[:-1]) == completed and not done.stderr


def test_zsh_takes_the_same(script, capsys):
    assert main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("autoload -Uz compinit bashcompinit") and out.endswith(script)
