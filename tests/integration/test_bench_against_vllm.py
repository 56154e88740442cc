"""`octavo bench serve` and vLLM's own client, at the same time on one octavo server, tell the same.

OCTAVO_VLLM_PYTHON names the Python of an environment with vLLM and selects the test. Both clients run at
once, so other work on the machine changes the figures of both alike; and at rates that differ by 1 %, else
requests of one would always come so long after those of the other, and wait for their steps. The time to a
first token holds what the client itself takes to send a request, some milliseconds: there, 5 ms are let pass.
"""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest

from octavo.base.hub import locate
from tests.served_process import ServeProcess

PYTHON = os.environ.get("OCTAVO_VLLM_PYTHON", "")
CLIENT = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
LOAD = """--num-prompts 240 --random-input-len 24 --random-output-len 24 --request-rate 4 --burstiness inf
    --temperature 0 --percentile-metrics ttft,tpot,itl,e2el --goodput ttft:2000 --num-warmups 4
    --save-result --save-detailed --disable-tqdm"""
SHARED = [
    *("duration", "completed", "failed", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput",),
    *(f"{word}_{name}_ms" for word in ("mean", "median") for name in ("ttft", "tpot", "itl", "e2el")),
]


@pytest.mark.opt_in("OCTAVO_VLLM_PYTHON")
def test_both_clients_tell_the_same(tmp_path):
    words = shlex.split(LOAD)
    words += ["--tokenizer", str(locate("minilm")), "--model", "m", "--served-model-name", "fake"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["HF_HUB_OFFLINE"] = "1"
    with ServeProcess("--max-num-seqs", "16", orders={"step_s": 0.02}) as server:
        words += ["--port", str(server.port), "--result-dir", str(tmp_path), "--result-filename"]
        log = tmp_path / "vllm.log"
        with log.open("wb") as file:
            command = [PYTHON, "-u", "-c", CLIENT, *words, "vllm.json"]
            theirs = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        while b"Starting main benchmark run" not in log.read_bytes():
            assert theirs.poll() is None, log.read_text()[-2000:]
            time.sleep(0.05)
        words[words.index("--request-rate") + 1] = "4.04"
        ours = [sys.executable, "-m", "octavo", "bench", "serve", *words, "octavo.json"]
        subprocess.run(ours, check=True, timeout=200)
        assert theirs.wait(200) == 0, log.read_text()[-2000:]
    vllm, octavo = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("vllm", "octavo"))
    assert set(vllm) == set(octavo)
    errors = {name: octavo[name] / vllm[name] - 1 for name in SHARED if vllm[name]}
    sys.stdout.write(json.dumps({name: [vllm[name], octavo[name]] for name in errors}) + "\n")
    slack_ms = {name: 5.0 for name in SHARED if "ttft" in name}
    for name, error in errors.items():
        assert abs(error) < 0.03 or abs(octavo[name] - vllm[name]) < slack_ms.get(name, 0), (name, errors)
