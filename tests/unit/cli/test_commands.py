import io
import json
import subprocess
import sys

import pytest

import octavo
from octavo.base import env, hub
from octavo.base.errors import EngineDead
from octavo.cli import doctor, machine
from octavo.cli.main import COMMANDS, main
from octavo.messages.sampling import SamplingParams
from tests.unit.cli.fake_llm import FakeLLM


class Launcher:
    """Stands in for the class LLM: keeps what was launched."""

    def __init__(self):
        self.options = {}
        self.prepare = lambda llm: None
        self.llm = None

    def from_engine_args(self, args):
        self.llm = FakeLLM(args, **self.options)
        self.prepare(self.llm)
        return self.llm


@pytest.fixture
def launcher(monkeypatch):
    launcher = Launcher()
    monkeypatch.setitem(vars(octavo), "LLM", launcher)
    return launcher


def test_one_prompt_streams(launcher, capsys):
    assert main(["generate", "hello there", "--max-tokens", "5", "--max_num_seqs=3"]) == 0
    out, err = capsys.readouterr()
    assert out == "echo hello there\n"
    assert "1 prompt of 27 tokens (1 from the prefix cache); 3 new tokens in" in err
    assert "tok/s; first token after" in err
    assert launcher.llm.args.max_num_seqs == 3
    params = launcher.llm.llm_engine.params["0"]
    assert (params.temperature, params.max_tokens) == (0.0, 5)
    assert launcher.llm.is_closed


def test_several_prompts_are_listed_in_order(launcher, capsys):
    launcher.prepare = lambda llm: llm.llm_engine.answers.update(a="a long answer here", b="short")
    assert main(["generate", "a", "b"]) == 0
    assert capsys.readouterr().out == "[1] a\na long answer here\n\n[2] b\nshort\n\n"


def test_several_answers_per_prompt(launcher, capsys):
    assert main(["generate", "a", "--n", "2", "--temperature", "0.8", "--seed", "7"]) == 0
    assert capsys.readouterr().out == "[1] a\n(1) echo a\n(2) echo a\n\n"
    assert launcher.llm.llm_engine.params["0"].seed == 7


@pytest.mark.parametrize(
    ("recommended", "temperature"),
    [({}, 1.0), ({"temperature": 0.0, "top_k": 5}, 1.0), ({"temperature": 0.6}, 0.6)],
)
def test_several_answers_of_a_greedy_model_are_sampled(recommended, temperature, launcher, capsys):
    launcher.options = {"recommended": SamplingParams(**recommended)}
    assert main(["generate", "a", "--n", "2"]) == 0
    assert launcher.llm.llm_engine.params["0"].temperature == temperature
    main(["generate", "a"])
    assert launcher.llm.llm_engine.params["0"].temperature == recommended.get("temperature", 0.0)


def test_flags_may_stand_between_prompts(launcher, capsys):
    assert main(["generate", "a", "--stop", "x", "b", "--stop", "y", "--ignore-eos"]) == 0
    params = launcher.llm.llm_engine.params["1"]
    assert (params.stop, params.ignore_eos, params.max_tokens) == (["x", "y"], True, 256)


def test_a_prompt_from_standard_input(launcher, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    main(["generate", "-", "--raw"])
    assert capsys.readouterr().out == "echo from a pipe\n"


def test_templates_are_applied_unless_raw_or_absent(launcher, capsys):
    main(["generate", "q", "--system-prompt", "be brief"])
    assert launcher.llm.llm_engine.prompts["0"] == "system:be brief\nuser:q\nassistant:"
    main(["generate", "q", "--raw"])
    assert launcher.llm.llm_engine.prompts["0"] == "q"
    launcher.options = {"chat_template": False}
    main(["generate", "q"])
    assert launcher.llm.llm_engine.prompts["0"] == "q"


def test_the_models_own_sampling_is_kept_and_flags_win(launcher, capsys):
    launcher.options = {"recommended": SamplingParams(temperature=0.6, top_p=0.9)}
    main(["generate", "q", "--top-p", "0.5"])
    params = launcher.llm.llm_engine.params["0"]
    assert (params.temperature, params.top_p) == (0.6, 0.5)


def test_a_failed_request_is_reported_and_others_answer(launcher, capsys):
    launcher.prepare = lambda llm: llm.llm_engine.answers.update(bad="FAIL")
    assert main(["generate", "bad", "good"]) == 1
    out, err = capsys.readouterr()
    assert "echo good" in out
    assert "prompt 1 failed: it broke" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["generate"], "Give at least one prompt"),
        (["generate", "q", "--temperature", "5"], "temperature must be in"),
        (["generate", "q", "--n", "2", "--temperature", "0"], "n must be 1 when using greedy sampling"),
        (["generate", "x" * 500], "The prompt has"),
        (["pull", "no-such-model"], "neither an existing folder"),
    ],
)
def test_mistakes_end_in_one_line(argv, says, launcher, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("octavo: error: ")
    assert says in err
    assert "Traceback" not in err


def test_a_dead_engine_is_status_1(launcher, capsys):
    def die(llm):
        raise EngineDead("the core ended")

    launcher.prepare = die
    assert main(["generate", "q"]) == 1
    assert "the core ended" in capsys.readouterr().err


def test_an_interrupt_is_status_130(launcher, capsys):
    launcher.prepare = lambda llm: setattr(llm.llm_engine, "interrupt_at", 2)
    assert main(["generate", "one two three"]) == 130
    assert capsys.readouterr().out == "echo\n"


def test_chat_asks_once_with_q(launcher, capsys):
    assert main(["chat", "some-model", "-q", "hi"]) == 0
    assert capsys.readouterr().out == "echo hi\n"
    assert launcher.llm.args.model == "some-model"
    assert launcher.llm.llm_engine.params["0"].max_tokens is None


def test_chat_keeps_history_and_obeys_commands(launcher, capsys, monkeypatch):
    lines = "one\n\n/system be kind\ntwo\n/reset\nthree\n/nonsense\n/exit\nfour\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "echo one\necho two\necho three\n"
    assert "/reset forgets" in err
    prompts = launcher.llm.llm_engine.prompts
    assert prompts["1"] == "system:be kind\nuser:one\nassistant:echo one\nuser:two\nassistant:"
    assert prompts["2"] == "system:be kind\nuser:three\nassistant:"
    assert len(prompts) == 3


def test_chat_survives_a_message_that_is_too_long(launcher, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 500 + "\nshort\n"))
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out == "echo short\n"
    assert "/reset starts anew" in err
    assert launcher.llm.llm_engine.prompts == {"1": "user:short\nassistant:"}


def test_chat_forgets_a_message_that_failed(launcher, capsys, monkeypatch):
    launcher.prepare = lambda llm: llm.llm_engine.answers.update(bad="FAIL")
    monkeypatch.setattr("sys.stdin", io.StringIO("bad\ngood\n"))
    assert main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("echo good\n")
    assert "it broke" in err
    assert launcher.llm.llm_engine.prompts["1"] == "user:good\nassistant:"
    assert launcher.llm.is_closed


def test_ctrl_c_stops_an_answer_and_not_the_chat(launcher, capsys, monkeypatch):
    launcher.prepare = lambda llm: setattr(llm.llm_engine, "interrupt_at", 3)
    monkeypatch.setattr("sys.stdin", io.StringIO("a b c d\nz\n"))
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "echo a\necho z\n"
    engine = launcher.llm.llm_engine
    assert engine.aborted == ["0"]
    assert "assistant:echo a\nuser:z" in engine.prompts["1"]


def test_chat_needs_a_template(launcher, capsys):
    launcher.options = {"chat_template": False}
    assert main(["chat", "-q", "hi"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_pull_prints_where_the_model_is(capsys, smollm2_path):
    assert main(["pull", "smollm2"]) == 0
    assert capsys.readouterr().out.strip() == str(smollm2_path)


def test_pull_finds_damage(tmp_path, monkeypatch, capsys):
    broken = hub.BUILT_IN["smollm2"]._replace(file="broken.gguf")
    monkeypatch.setitem(hub.BUILT_IN, "smollm2", broken)
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "broken.gguf").write_bytes(b"x")
    assert main(["pull", "smollm2"]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_collect_env(capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_FAULT", "none")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/home/somebody/cache")
    assert main(["collect-env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["octavo"] == octavo.__version__
    assert rows["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert rows["torch"] != "missing"
    assert int(rows["cores"]) >= 1
    assert "OCTAVO_FAULT=none" in rows["environment"]
    assert rows["cache"] == "~/cache" and "OCTAVO_CACHE_DIR=~/cache" in rows["environment"]


def test_machine_facts():
    total, available = machine.memory_bytes()
    assert 0 < available <= total
    assert machine.first_lines(["no-such-program"], 1) == []
    assert machine.first_lines([sys.executable, "-c", "print(1); print(2)"], 1) == ["1"]
    assert machine.first_lines([sys.executable, "-c", "raise SystemExit(3)"], 1) == []


PLANNED = json.dumps(
    {
        "weight_bytes": 1 << 30,
        "matrices": {"U4 64x64": 2, "U4 64x128": 1, "Q8_0 9x64": 1},
        "num_tokens": 99,
        "problem": "",
    }
)


def _doctor(monkeypatch, **changes):
    answers = {
        "package_versions": {"torch": "2.13"},
        "compiler": "g++ 12",
        "memory_bytes": (8 << 30, 4 << 30),
        "gpus": [],
    } | changes
    for name, value in answers.items():
        monkeypatch.setattr(machine, name, lambda value=value: value)
    built = "/cache/kernels.so\n" if machine.compiler() else ""

    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, PLANNED if "plan" in command else built, "")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setattr(env, "kernels_disabled", lambda: False)


def test_doctor_on_a_healthy_machine(monkeypatch, capsys, tmp_path):
    _doctor(monkeypatch)
    assert main(["doctor", "--model", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "!!" not in out
    assert f"model     {tmp_path}" in out
    assert "weights   1.0 GiB, 3 x U4, 1 x Q8_0; room for 99 tokens" in out
    assert "kernels   /cache/kernels.so" in out


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"package_versions": {"torch": "missing"}}, "pip install torch"),
        ({"compiler": ""}, "apt-get install g++"),
        ({"memory_bytes": (8 << 30, 1 << 30)}, "close other programs"),
    ],
)
def test_doctor_says_what_to_do(changes, advice, monkeypatch, capsys, tmp_path):
    _doctor(monkeypatch, **changes)
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("!!") == 1
    assert advice in out


def test_doctor_wants_no_compiler_where_kernels_came_built(monkeypatch, capsys, tmp_path):
    _doctor(monkeypatch)
    monkeypatch.setattr(machine, "compiler", lambda: "")
    assert main(["doctor", "--model", str(tmp_path)]) == 0
    assert "g++ not found" in capsys.readouterr().out


def test_doctor_says_why_weights_cannot_be_loaded(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["UnknownModel"]}')
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert "cannot be loaded" in capsys.readouterr().out


def test_doctor_misses_models(monkeypatch, capsys):
    _doctor(monkeypatch)
    monkeypatch.setattr(hub, "installed", lambda name: None)
    assert main(["doctor"]) == 1
    assert "octavo pull smollm2" in capsys.readouterr().out
    assert main(["doctor", "--model", "nonsense"]) == 1
    assert "`octavo pull NAME`" in capsys.readouterr().out


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in out
        assert command.summary in out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    assert f"usage: octavo {name}" in capsys.readouterr().out


def test_unknown_commands_and_the_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["genrate"])
    assert done.value.code == 2
    err = capsys.readouterr().err
    assert "unknown command 'genrate'; known: generate" in err and "Did you mean generate?" in err
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


def test_a_closed_pipe_ends_quietly():
    command = f"{sys.executable} -m octavo collect-env | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("octavo")
    assert "Traceback" not in done.stderr
