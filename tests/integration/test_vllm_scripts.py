"""Scripts in the forms that vLLM's documentation describes run on the default model, importing vllm."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.served_process import ServeProcess

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
AS_VLLM = ["-m", "octavo.as_vllm"]
PROMISES = {
    "basic": [r"'The capital of France is' -> ' Paris.*', 5 tokens"],
    "chat": [r"one: .*Paris", r"batch: 1 text", r"template: \s*\w"],
    "prefix_caching": [
        r"cached tokens: \[\d{3}, \d{2,3}, \d{2,3}\]",
        "same answers: True",
        "forgotten: True",
    ],
    "structured_outputs": [
        r"choice: (Positive|Negative)",
        r"regex: [a-z]{3,8}@[a-z]{3,8}\.com",
        r"json: brand='.*' colour=<Colour\.",
        r"grammar: SELECT [ab] FROM t[12]\n",
    ],
    "logits_processor": ["only: True", "never: True", "refused: target_token 'word' is not an int"],
    "prompt_embeds": [r"single:  Paris", "equal: True"],
    "metrics": [
        r"vllm:generation_tokens \(counter\) = 10\n",
        r"vllm:num_requests_running \(gauge\) = 0",
        r"vllm:time_to_first_token_seconds \(histogram\) sum = \d.* count = 2\n",
        r"\+Inf = 2",
    ],
    "profiling": [r"traces: [1-9]"],
    "torchrun": ["ranks: 1, texts of all ranks equal: True"],
    "async_streaming": [r"\[stream-1\] [2-6] pieces: '.+'", r"\[stream-2\] [2-6] pieces: '.+'"],
    "llm_engine": [r"0: \[.+\]\n", r"1: \[.+\]\n", r"2: \[.+, .+\]\n"],
    "early_engine": [
        r"True ' Paris.*' 8\n",
        r"Either prompt or prompt_token_ids must be provided\.",
        "steps: 8",
    ],
}
ARGUMENTS = {
    "basic": ["--max-tokens", "5", "--temperature=0", "--max_num_seqs", "4"],
    "llm_engine": ["--model", "smollm2", "--max-model-len", "512"],
    "profiling": ["{folder}"],
}

FAST = "basic", "llm_engine"
CHOSEN = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROMISES]


def run(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_script_is_run():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(PROMISES)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", CHOSEN)
def test_script(name, smollm2_path, tmp_path):
    given = [word.format(folder=tmp_path) for word in ARGUMENTS.get(name, [])]
    hook = [] if name == "early_engine" else AS_VLLM
    printed = run(*hook, str(SCRIPTS / f"{name}.py"), *given).stdout
    for promise in PROMISES[name]:
        assert re.search(promise, printed), printed


@pytest.mark.slow
def test_ranks_of_torchrun(smollm2_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", *AS_VLLM]
    printed = run(*launch, str(SCRIPTS / "torchrun.py"), "--tensor-parallel-size=3").stdout
    assert "ranks: 3, texts of all ranks equal: True" in printed


def test_a_file_of_requests(smollm2_path, tmp_path):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    line = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    run(*AS_VLLM, "-m", "vllm.entrypoints.openai.run_batch", *files, "--model", "smollm2")
    [answer] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (answer["custom_id"], answer["response"]["status_code"]) == ("request-1", 200)


SERVER_IN_A_PROGRAM = """
import uvloop
from vllm.entrypoints.openai.api_server import run_server
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser(description="A server of one's own.")).parse_args()
validate_parsed_serve_args(args)
uvloop.run(run_server(args))
"""


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["module", "program"])
def test_a_server(form, smollm2_path, tmp_path):
    (tmp_path / "program.py").write_text(SERVER_IN_A_PROGRAM)
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    program = [*AS_VLLM, *(module if form == "module" else [str(tmp_path / "program.py")])]
    with ServeProcess("--model", "smollm2", "--max-model-len", "512", program=program) as server:
        body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"] == " Paris."


def test_lines_of_the_log_when_the_environment_asks_for_them(smollm2_path):
    command = ["-c", "from octavo import LLM; LLM('smollm2').generate('Hello, world!')"]
    assert " DEBUG octavo." in run(*command, VLLM_LOG_LEVEL="debug").stderr
