import json
import logging
import os
from pathlib import Path

import pytest

from octavo.base import env, log
from octavo.base.errors import ConfigError


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    for name in list(env.os.environ):
        if name.startswith(("OCTAVO_", "VLLM_", "HF_HUB", "CXX")):
            monkeypatch.delenv(name)


def test_defaults(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.log_level() == "INFO"
    assert env.cache_dir() == Path("/home/someone/.cache/octavo")
    assert not env.kernels_disabled()
    assert not env.offline()
    assert env.fault() == ""
    assert env.compiler() == "g++"


def test_values(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert env.log_level() == "DEBUG"
    monkeypatch.setenv("OCTAVO_LOGGING_LEVEL", "error")
    assert env.log_level() == "ERROR"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "~/kept")
    assert env.cache_dir() == Path("~/kept").expanduser()
    for name, read in (("OCTAVO_NO_CPU_KERNELS", env.kernels_disabled), ("HF_HUB_OFFLINE", env.offline)):
        for value, expected in (("1", True), ("0", False), ("", False)):
            monkeypatch.setenv(name, value)
            assert read() is expected
    monkeypatch.setenv("CXX", "clang++")
    assert env.compiler() == "clang++"


def test_the_cache_is_where_the_desktop_keeps_its_caches(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast/cache")
    assert env.cache_dir() == Path("/fast/cache/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert env.cache_dir() == Path("/home/someone/.cache/octavo"), "the specification says: ignore it"
    monkeypatch.setenv("OCTAVO_CACHE_DIR", "/elsewhere")
    assert env.cache_dir() == Path("/elsewhere")


def test_plugins_by_name(monkeypatch):
    assert env.plugins() is None
    monkeypatch.setenv("VLLM_PLUGINS", "one, two")
    assert env.plugins() == ["one", "two"]
    monkeypatch.setenv("OCTAVO_PLUGINS", "")
    assert env.plugins() == []


def test_the_log_as_a_file_says(monkeypatch, tmp_path):
    path, log_file = tmp_path / "logging.json", tmp_path / "log"
    handler = {"class": "logging.FileHandler", "filename": str(log_file)}
    logger = {"handlers": ["file"], "level": "INFO"}
    config = {"version": 1, "disable_existing_loggers": False, "handlers": {"file": handler}}
    path.write_text(json.dumps(config | {"loggers": {"octavo_elsewhere": logger}}))
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(path))
    log.setup()
    elsewhere = logging.getLogger("octavo_elsewhere")
    elsewhere.info("written as configured")
    elsewhere.handlers[0].close()
    elsewhere.handlers.clear()
    assert log_file.read_text() == "written as configured\n"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"logging\.json cannot be used"):
        log.setup()


def test_reports_show_settings_but_no_secrets(monkeypatch):
    monkeypatch.setenv("OCTAVO_FAULT", "x")
    monkeypatch.setenv("OCTAVO_API_KEY", "hidden")
    monkeypatch.setenv("SOMETHING_ELSE", "y")
    shown = env.settings()
    assert "OCTAVO_FAULT=x" in shown
    assert "hidden" not in " ".join(shown)
    assert "SOMETHING_ELSE=y" not in shown


def test_kernels_of_a_snapshot_lie_in_it_whatever_was_set(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    env.keep_gpu_kernels(tmp_path / "absent")
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    env.keep_gpu_kernels(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
