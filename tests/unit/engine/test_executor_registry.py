"""Executors by name, and the config that names them on its way to another process."""

import dataclasses

import msgspec
import pytest

from octavo.base.errors import ConfigError
from octavo.config import EngineArgs, EngineConfig, resolve
from octavo.engine.executor import EXECUTORS, make_executor
from tests.process_fakes import EXECUTOR, ObedientExecutor, process_config


def test_every_executor_loads():
    for name in EXECUTORS.names():
        assert isinstance(make_executor(process_config(name)), EXECUTORS.load(name))


def test_executor_class_of_ones_own():
    assert isinstance(make_executor(process_config(EXECUTOR)), ObedientExecutor)


def test_unknown_executor():
    with pytest.raises(
        ConfigError, match=r"Unknown executor 'slurm'\. Known: external_launcher, inproc, mp, ray\."
    ):
        make_executor(process_config("slurm"))
    with pytest.raises(
        ConfigError, match=r"distributed_executor_backend='slurm' is not one of .*module:Class"
    ):
        resolve(EngineArgs(distributed_executor_backend="slurm"))


def test_resolve_allows_a_class(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 64}')
    args = EngineArgs(model=str(tmp_path), load_format="dummy", distributed_executor_backend=EXECUTOR)
    assert resolve(args).parallel.distributed_executor_backend == EXECUTOR


def test_config_round_trip():
    nested = {"rope": {"factor": 2.5, "layers": [1, None, True]}, "text": "é"}
    config = process_config(**nested)
    assert EngineConfig.from_msgpack(config.to_msgpack()) == config


def test_config_with_a_value_that_cannot_travel():
    with pytest.raises(ConfigError, match="cannot be sent"):
        process_config(entry=object()).to_msgpack()


def test_config_with_a_field_of_the_wrong_type():
    config = process_config()
    wrong = dataclasses.replace(config, cache=dataclasses.replace(config.cache, block_size="many"))
    with pytest.raises(ConfigError, match=r"Expected `int`, got `str`.*cache\.block_size"):
        EngineConfig.from_msgpack(msgspec.msgpack.encode(wrong))
