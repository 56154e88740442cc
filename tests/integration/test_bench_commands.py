"""`octavo bench latency | throughput | startup` with the default model."""

import json

import pytest

from octavo.cli.main import main

ENGINE = ["--max-model-len=256", "--max-num-seqs=4", "--num-gpu-blocks-override=64"]


@pytest.fixture
def result(tmp_path, smollm2_path):
    """Runs a benchmark; its result."""

    def run(*words):
        path = tmp_path / "result.json"
        assert main(["bench", *words, *ENGINE, f"--output-json={path}"]) == 0
        return json.loads(path.read_text())

    return run


def test_latency(result, capsys):
    words = ["--input-len=8", "--output-len=4", "--batch-size=2", "--num-iters=3", "--num-iters-warmup=1"]
    told = result("latency", *words)
    assert set(told) == {"model_id", "avg_latency", "latencies", "percentiles"}
    assert len(told["latencies"]) == 3 and told["avg_latency"] == pytest.approx(sum(told["latencies"]) / 3)
    assert list(told["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert "50% percentile latency" in capsys.readouterr().out


@pytest.mark.matrix
@pytest.mark.parametrize("mode", [[], ["--async-engine", "--disable-detokenize"]], ids=["", "async"])
def test_throughput(result, mode):
    words = ["--num-prompts=5", "--num-warmups=1", "--input-len=8", "--output-len=4", "--n=2"]
    told = result("throughput", *words, *mode)
    vllm = {"model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second"}
    assert vllm | {"tokens_per_second"} <= set(told)
    assert (told["num_requests"], told["total_output_tokens"]) == (5, 5 * 2 * 4)
    assert told["total_num_tokens"] == 5 * 8 + 5 * 2 * 4


def test_startup(result):
    told = result("startup", "--num-iters-cold=0", "--num-iters-warmup=0", "--num-iters-warm=1")
    assert set(told) == {"avg_warm_startup_time", "warm_startup_times", "warm_startup_percentiles"}
    assert 0.01 < told["avg_warm_startup_time"] < 100


def test_an_engine_that_does_not_start_is_told(capsys):
    words = ["--num-iters-cold=0", "--num-iters-warmup=0", "--num-iters-warm=1", "--max-model-len=1000000"]
    assert main(["bench", "startup", *words]) == 1
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert "The engine did not start" in err and "longer than" in err
