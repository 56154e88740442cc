"""plan_cache: how many blocks, and when it refuses."""

import dataclasses
import logging

import pytest

from octavo.base.errors import ConfigError
from octavo.engine.startup import plan_cache
from octavo.messages.kv import ModelReady
from tests.fakes import fake_config, fake_groups

BLOCK = 4 * 64  # bytes: 4 slots of one layer


def plan(
    windows=(0,), available=1 << 30, device="cpu", weight_bytes=0, workspace_bytes=0, fit=False, **options
):
    config = fake_config(**({"num_blocks": 0, "max_model_len": 64, "max_num_seqs": 8} | options))
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, device=device), fit_max_model_len=fit
    )
    return plan_cache(config, ModelReady(fake_groups(*windows), available, weight_bytes, workspace_bytes))


def test_number_comes_from_the_user_first():
    assert plan(num_blocks=20).num_blocks == 20
    assert plan(num_blocks=20, cache={"kv_cache_memory_bytes": 100 * BLOCK}).num_blocks == 20
    assert plan(cache={"kv_cache_memory_bytes": 1000 * BLOCK + 5}).num_blocks == 1000


def test_memory_decides_and_cpu_takes_no_more_than_it_can_use():
    assert plan(available=1000 * BLOCK, device="cuda").num_blocks == 1000
    assert plan(available=1000 * BLOCK).num_blocks == 8 * 16 + 1
    assert plan(available=50 * BLOCK).num_blocks == 50


def test_a_window_needs_less():
    assert plan(num_blocks=12).max_model_len < 64
    assert plan(windows=(8,), num_blocks=12, max_num_batched_tokens=8).max_model_len == 64


def test_smallest_cache_that_holds_one_request():
    assert plan(cache={"kv_cache_memory_bytes": 17 * BLOCK}).num_blocks == 17
    with pytest.raises(ConfigError) as refusal:
        plan(cache={"kv_cache_memory_bytes": 16 * BLOCK})
    text = str(refusal.value)
    assert "max_model_len=64 tokens needs 17 blocks" in text and "room for 16" in text
    assert "Lower max_model_len to 61 or less" in text and "kv_cache_memory_bytes" in text
    assert plan(num_blocks=16, max_model_len=61).num_blocks == 16
    assert "largest step" not in text, "nothing is kept back for it here"
    with pytest.raises(ConfigError, match="room for 0"):
        plan(available=-5)


def test_a_length_is_lowered_where_it_may_be(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="octavo"):
        assert plan(num_blocks=16, fit=True).max_model_len == 61
    assert "max_model_len: 61, as much as the KV cache has room for" in caplog.text
    assert "max concurrency 1.0 at 61 tokens" in caplog.text
    assert plan(num_blocks=17, fit=True).max_model_len == plan(num_blocks=17).max_model_len == 64
    assert plan(available=9 * BLOCK, device="cuda", fit=True).max_model_len == 33
    assert plan(num_blocks=16).max_model_len == 61, "a chosen number of blocks stands"
    assert caplog.records[-1].levelname == "WARNING"
    with pytest.raises(ConfigError, match="Give the cache more memory"):
        plan(num_blocks=1, fit=True)


def test_what_fits_on_cpu_is_not_all_of_its_memory(monkeypatch):
    monkeypatch.setattr("octavo.engine.startup.CPU_CACHE_BYTES", 9 * BLOCK)
    assert plan(available=1000 * BLOCK, fit=True).max_model_len == 33
    assert plan(available=1000 * BLOCK).num_blocks == 17


def test_a_refusal_says_what_else_takes_memory():
    with pytest.raises(ConfigError, match=r"weights take 3 GiB, the largest step 1\.5 GiB"):
        plan(available=-5, weight_bytes=3 << 30, workspace_bytes=3 << 29)


def test_plan_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="octavo"):
        plan(num_blocks=33)
    assert "KV cache: 33 blocks, 128 tokens" in caplog.text
    assert "max concurrency 2.0 at 64 tokens" in caplog.text


def test_swap_space_is_counted_in_blocks_of_each_rank():
    assert plan(num_blocks=17).num_host_blocks == 0
    assert plan(num_blocks=17, cache={"swap_space": 1000.5 * BLOCK / 2**30}).num_host_blocks == 1000
    with pytest.raises(ConfigError, match=r"Too large swap space: 1 x 1e\+06 GiB out of the machine's"):
        plan(num_blocks=17, cache={"swap_space": 1e6})


def test_swap_space_that_is_no_use_is_left(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    swap = {"num_blocks": 17, "cache": {"swap_space": 0.001}}
    assert plan(**swap, enable_prefix_caching=False).num_host_blocks == 0
    assert "needs enable_prefix_caching" in caplog.text
    with caplog.at_level(logging.INFO, logger="octavo"):
        assert plan(**swap, device="cuda", weight_bytes=1 << 10).num_host_blocks == 0
    assert "computing tokens anew takes less time" in caplog.text
    assert plan(**swap, device="cuda", weight_bytes=1 << 34).num_host_blocks > 0
