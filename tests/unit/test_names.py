"""Import paths without files: every name of the table loads, under octavo's path and under vLLM's."""

import socket
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import octavo
import octavo.as_vllm
from octavo.base.errors import Unsupported
from octavo.names.modules import entries
from octavo.names.table import HOMES, LATER, MODULES, PATHS, PROGRAMS, TOP


def module(path):
    return import_module(f"octavo.{path}" if path else "octavo")


@pytest.mark.parametrize("path", [*PATHS, *MODULES])
def test_every_name_of_a_path_loads(path):
    found = module(path)
    theirs = import_module(f"vllm.{path}" if path else "vllm")
    assert theirs is found
    for name, entry in entries(path).items():
        value = getattr(found, name)
        assert value is not None
        assert (entry in HOMES) != (entry in LATER), entry
        if entry in TOP and entry == name:
            assert value is getattr(octavo, name)


def test_no_entry_is_unused():
    used = {entry for path in PATHS for entry in entries(path).values()}
    assert used == set(HOMES) | set(LATER)


def test_modules_are_listed_and_files_win():
    from octavo import v1
    from octavo.v1.metrics import reader

    assert set(dir(reader)) == set(reader.__all__) == set(entries("v1.metrics.reader"))
    assert not dir(v1)
    assert octavo.config.__file__ and octavo.engine.__file__
    with pytest.raises(ImportError, match="cannot import name 'Banana'"):
        from octavo.v1.metrics.reader import Banana  # noqa: F401
    for nowhere in ("octavo.v1.banana", "octavo.banana", "vllm.banana", "octavo.outputs.banana"):
        with pytest.raises(ModuleNotFoundError, match="banana"):
            import_module(nowhere)
    with pytest.raises(AttributeError, match=r"'octavo\.engine' has no attribute 'Banana'"):
        _ = octavo.engine.Banana


def test_a_missing_feature_says_so_when_it_is_used():
    from octavo.reasoning import ReasoningParser

    def annotated(parser: ReasoningParser | None = None) -> ReasoningParser | None:
        return parser

    assert annotated() is None and not isinstance(annotated, ReasoningParser)
    with pytest.raises(Unsupported, match="ReasoningParser: parsers cannot be added yet: name one"):
        ReasoningParser("parser")
    with pytest.raises(Unsupported, match="parsers cannot be added"):
        ReasoningParser.from_somewhere()
    with pytest.raises(Unsupported, match="StatLoggerBase"):
        from octavo.v1.metrics.loggers import StatLoggerBase

        class Mine(StatLoggerBase):
            pass


def test_paths_that_mean_another_name():
    from octavo.config import EngineConfig, VllmConfig
    from octavo.utils import Counter
    from octavo.v1.metrics.reader import Counter as MetricsCounter
    from octavo.v1.sample.logits_processor import LogitsProcessor

    assert VllmConfig is EngineConfig
    assert Counter is not MetricsCounter and LogitsProcessor is not octavo.LogitsProcessor
    counter = Counter(3)
    assert [next(counter), next(counter)] == [3, 4]


def test_addresses_and_ports(monkeypatch):
    from octavo.utils.network_utils import (
        get_distributed_init_method,
        get_ip,
        get_open_port,
        get_open_ports_list,
        get_tcp_uri,
    )

    socket.inet_aton(get_ip())
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert get_ip() == "10.1.2.3"
    with socket.create_server(("", get_open_port())):
        pass
    assert len(set(get_open_ports_list(3))) == 3
    assert get_tcp_uri("::1", 5) == "tcp://[::1]:5" and get_tcp_uri("h", 5) == "tcp://h:5"
    assert get_distributed_init_method("h", 5) == "tcp://h:5"


def test_the_platform():
    from octavo.platforms import current_platform

    assert current_platform.is_cuda() == torch.cuda.is_available() != current_platform.is_cpu()
    assert current_platform.device_type in ("cpu", "cuda") and not current_platform.is_rocm()
    assert current_platform.device_count() >= 1 and current_platform.get_device_total_memory() > 1 << 30
    assert current_platform.get_device_name()
    current_platform.seed_everything(5)
    first = torch.rand(1)
    current_platform.seed_everything(5)
    assert torch.equal(torch.rand(1), first)


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_whose_gpu_it_is(hip, monkeypatch):
    from octavo.platforms import current_platform

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert current_platform.is_cuda_alike() and not current_platform.is_cpu()
    assert (current_platform.is_cuda(), current_platform.is_rocm()) == (hip is None, hip is not None)


def test_variables_as_attributes(monkeypatch):
    import octavo.envs as envs

    assert envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE == 5 and not envs.is_set("VLLM_PORT")
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "7")
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "a,b")
    monkeypatch.setenv("VLLM_OF_ONES_OWN", "x")
    assert (envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE, envs.VLLM_USE_V1) == (7, False)
    assert (envs.VLLM_PLUGINS, envs.VLLM_OF_ONES_OWN) == (["a", "b"], "x")
    with pytest.raises(AttributeError, match="knows no default"):
        _ = envs.VLLM_UNHEARD_OF


def test_a_tokenizer_by_name(smollm2_path):
    from octavo.tokenizers import get_tokenizer

    tokenizer = get_tokenizer("smollm2")
    assert tokenizer.decode(tokenizer.encode("Hello, world!")) == "Hello, world!"


def test_a_template_by_its_file_or_its_text(tmp_path):
    from octavo.entrypoints.chat_utils import load_chat_template

    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert (
        load_chat_template(tmp_path / "t.jinja") == load_chat_template("{{ messages }}") == "{{ messages }}"
    )
    assert load_chat_template(None) is None


def test_settings_are_mappings_that_options_take():
    from octavo.config import CompilationMode, WeightTransferConfig
    from octavo.config.compilation import CompilationConfig
    from octavo.config.pooler import PoolerConfig

    config = CompilationConfig(mode=CompilationMode.NONE)
    assert config.mode == 0 and octavo.EngineArgs(compilation_config=config) == octavo.EngineArgs()
    with pytest.raises(AttributeError, match="CompilationConfig was given no 'level'"):
        _ = config.level
    config = PoolerConfig(pooling_type="MEAN")
    assert octavo.EngineArgs(pooler_config=config).pooler_config == {"pooling_type": "MEAN"}
    config = WeightTransferConfig(backend="ipc")
    assert octavo.EngineArgs(weight_transfer_config=config).weight_transfer_config == {"backend": "ipc"}


@pytest.mark.parametrize("path", PROGRAMS)
def test_programs_run_as_modules(path):
    command = [sys.executable, "-m", f"octavo.{path}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"octavo {PROGRAMS[path]}" in done.stdout


def test_a_script_and_its_arguments(tmp_path):
    (tmp_path / "beside.py").write_text("from vllm.utils import random_uuid\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, vllm, beside\n"
        "from vllm import SamplingParams\n"
        "import vllm.envs as envs\n"
        "assert __name__ == '__main__' and vllm.__name__ == 'octavo', vllm\n"
        "print(sys.argv[1:], SamplingParams.__module__, envs.VLLM_USE_V1, len(beside.random_uuid()))\n"
    )
    command = [sys.executable, "-m", "octavo.as_vllm"]
    done = subprocess.run(
        [*command, script, "-m", "x"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "['-m', 'x'] octavo.messages.sampling True 32\n", done.stderr
    done = subprocess.run(
        [*command, "-m", "vllm.entrypoints.openai.run_batch", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "octavo run-batch" in done.stdout, done.stderr
    assert "usage" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


def test_processes_of_a_script(tmp_path):
    """Spawned ones, and Python started anew."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, subprocess, sys, vllm\n"
        "def report(answers): answers.put(vllm.__name__)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    answers = context.Queue()\n"
        "    context.Process(target=report, args=(answers,)).start()\n"
        "    command = 'import vllm.utils; from vllm import LLM; print(vllm.__name__)'\n"
        "    print(answers.get(timeout=50), flush=True)\n"
        "    subprocess.run([sys.executable, '-c', command], check=True)\n"
    )
    command = [sys.executable, "-m", "octavo.as_vllm", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["octavo", "octavo"], done.stderr


def test_vllm_itself_comes_first_or_not_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", object())
    with pytest.raises(ImportError, match=r"octavo\.as_vllm comes first"):
        octavo.as_vllm.install()
