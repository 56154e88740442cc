"""`octavo serve` up to where the server begins: flags, YAML, vLLM's spellings, exit codes."""

import dataclasses
import signal
import socket
import sys

import pytest

from octavo.base.errors import BadCheckpoint, ConfigError, EngineDead, Unsupported
from octavo.cli import serve
from octavo.cli.main import main
from octavo.config.secret import Secret
from octavo.config.server import ServerConfig


@pytest.fixture
def served(monkeypatch):
    """What the server would have been started with."""
    calls = []
    monkeypatch.setattr(serve, "load_object", lambda target: lambda *given: calls.append(given))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(serve, "leave", sys.exit)
    monkeypatch.setattr(serve, "start_ahead", lambda module: None)
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return calls


def started(calls, *words):
    """(EngineArgs, ServerConfig) of a command line."""
    with pytest.raises(SystemExit) as done:
        main(["serve", *words, "--port", "0"])
    assert done.value.code == 0
    engine, config, listener = calls.pop()
    assert listener.socket.fileno() == -1, "closed in the end"
    return engine, config


def test_defaults(served):
    engine, config = started(served)
    assert config == ServerConfig(port=0)
    assert (engine.shutdown_timeout, engine.max_num_queued_reqs) == (30.0, -1)


def test_every_field_is_a_flag(capsys):
    assert main(["serve", "--help=all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(ServerConfig):
        assert "--" + field.name.replace("_", "-") in shown
        assert " ".join(field.metadata["explain"].split()[:3]) in shown


def test_flags_as_vllm_writes_them(served):
    engine, config = started(
        served,
        *("some-model", "-tp", "2", "--max_model_len", "4k", "--shutdown-timeout", "5"),
        *("--api-key", "a", "b", "--api-key", "c", "--disable-uvicorn-access-log", "--host", "0.0.0.0"),
        *("--allowed-origins", '["https://x", "https://y"]', "--root-path", "/v", "--ssl-cert-reqs", "0"),
        *("--uvicorn-log-level", "info", "--enable-server-load-tracking", "--disable-log-stats"),
        *("--limit-mm-per-prompt", "{}", "--h11-max-incomplete-event-size", "8192"),
    )
    assert (engine.model, engine.tensor_parallel_size, engine.max_model_len) == ("some-model", 2, 4000)
    assert (engine.shutdown_timeout, engine.disable_log_stats) == (5.0, True)
    assert config.api_key == [Secret.of(key) for key in "abc"]
    assert config.allowed_origins == ["https://x", "https://y"]
    assert (config.disable_access_log, config.root_path, config.max_header_bytes) == (True, "/v", 8192)


def test_a_config_file(served, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: some-model\nhost: 0.0.0.0\napi-key: [a, b]\nmax_num_seqs: 3\n"
        "disable-uvicorn-access-log: true\nallowed_origins: [https://x]\nmax-request-bytes: 1M\n"
    )
    engine, config = started(served, "--config", str(file), "--max-num-seqs", "4")
    assert (engine.model, engine.max_num_seqs) == ("some-model", 4)
    assert config.api_key == [Secret.of("a"), Secret.of("b")]
    assert (config.host, config.disable_access_log, config.max_request_bytes) == ("0.0.0.0", True, 1 << 20)


def test_the_environment_decides_what_flags_do_not(served, monkeypatch):
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "7")
    assert started(served)[1].keep_alive_timeout == 7.0
    assert started(served, "--keep-alive-timeout", "3")[1].keep_alive_timeout == 3.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "there is no key"),
        (["--middleware", "x.y"], "No code is loaded by name into the server"),
        (["--lora-modules", "a"], "give name=path or a JSON object, got 'a'"),
        (["--lora-modules", '{"name": "a"}'], "is no JSON object of name and path"),
        (["--lora-modules", "a=b"], "lora_modules needs enable_lora"),
        (["--lora-folder", "/no/such"], "there is no folder '/no/such'"),
        (["--tool-parser-plugin", "x.py"], "No code is loaded by name into the server"),
        (["--ssl-certfile", "/no/such"], "there is no file"),
        (["--api-key", "two words"], "printable ASCII"),
        (["--port", "70000"], "port must be between"),
    ],
)
def test_mistakes_are_status_2_and_one_line(words, says, served, capsys):
    assert main(["serve", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("octavo: error: ")
    assert err.count("\n") == 1
    assert says in err
    assert not served


def test_a_port_in_use_is_told_before_anything_is_loaded(served, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "no-such-model", "--port", port]) == 2
    assert f"Port 127.0.0.1:{port} is in use" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadCheckpoint("weights.bin is damaged"), 3),
        (Unsupported("this architecture is not known"), 3),
        (ConfigError("the option is wrong"), 2),
        (EngineDead("the core ended"), 1),
    ],
)
def test_what_ends_the_server_is_the_last_line(error, status, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(serve, "load_object", lambda target: fail)
    monkeypatch.setattr(serve, "start_ahead", lambda module: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(["serve", "--port", "0"]) == status
    assert capsys.readouterr().err.splitlines()[-1] == f"octavo: error: {error}"
