"""The tuner measures the default model; the memory optimizer says what `octavo plan` says."""

import json
import subprocess
import sys

import pytest

from octavo.base.errors import ConfigError
from octavo.memory_optimizer import MemoryOptimizer
from octavo.performance_tuning import Benchmark, PerformanceTuner


def test_a_measurement_and_what_it_points_to(smollm2_path):
    tuner = PerformanceTuner(
        "smollm2", num_prompts=2, prompt_tokens=8, max_tokens=4, max_model_len=256, max_num_seqs=4
    )
    measured = tuner.run_benchmark()
    assert set(measured) == {"throughput", "latency", "gpu_util", "memory_usage"}
    assert measured["throughput"] > 0 and 0 < measured["latency"] < 8 / measured["throughput"] * 1.5
    assert 0 <= measured["gpu_util"] <= 100 and 0 < measured["memory_usage"] <= 1
    slow = Benchmark(throughput=1.0, latency=0.6, gpu_util=90.0, memory_usage=0.95)
    assert [text.split()[0] for text in tuner.analyze_bottlenecks(slow)] == ["Memory", "Requests"]
    assert len(tuner.analyze_bottlenecks()) <= 3
    best = tuner.optimize_config([{"max_num_seqs": 2}, {"max_model_len": 10**9}])
    assert best == {"max_model_len": 256, "max_num_seqs": 2}
    with pytest.raises(ConfigError, match="longer than"):
        tuner.optimize_config([{"max_model_len": 10**9}])


def test_the_layout_is_that_of_the_plan(smollm2_path):
    options = {"max_model_len": 512, "num_gpu_blocks_override": 64, "device": "cpu"}
    layout = MemoryOptimizer("smollm2", "8GiB", **options).optimize_memory_layout()
    flags = ["--max-model-len=512", "--num-gpu-blocks-override=64", "--device=cpu", "--device-memory=8GiB"]
    command = [sys.executable, "-m", "octavo", "plan", "smollm2", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    plan = json.loads(done.stdout)
    assert layout["model_weights"]["size"] == plan["weight_bytes"]
    assert layout["kv_cache"]["size"] == plan["kv_bytes"]
    assert layout["intermediate"]["size"] == plan["step_bytes"] + plan["recorded_bytes"] + plan["table_bytes"]
    assert {place["location"] for place in layout.values()} == {"cpu"}
    assert "int8" in layout["model_weights"]["optimization"]


def test_a_model_of_so_many_bytes():
    layout = MemoryOptimizer(model_size=10 << 30, available_memory=20 << 30).optimize_memory_layout()
    assert layout["kv_cache"]["size"] == int(0.92 * (20 << 30)) - (10 << 30)
    assert MemoryOptimizer(10 << 30, "1GiB").optimize_memory_layout()["kv_cache"]["size"] == 0
