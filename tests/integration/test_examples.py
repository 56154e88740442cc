"""Every script in examples/ runs on the default model and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMISES = {
    "basic": [r"'The capital of France is' -> '.+'"],
    "chat": [r"assistant: .*Paris", r"[1-9]\d* of \d+ prompt tokens were cached"],
    "prefix_caching": [r"cold: \d+ of", r"warm: [1-9]\d* of"],
    "async_streaming": [r"\[one\] '.+'", r"\[two\] '.+'"],
    "streaming_input": [r"capital of France is' -> ' Paris", r"is Paris.*\\nThe capital of Italy is' -> ' "],
    "beam_search": [r"1 group\(s\):\n( +-\d+\.\d\d  .+\n){3}3 group", r"Paris"],
    "custom_logits_processor": [r"free: '( blue){12}'", r"never_repeat: ' blue red", r"only: '( sun){12}'"],
    "priorities": [r"urgent: .*\n(also )?soon: .*\n(also )?soon: .*\nwhenever: "],
    "metrics": [r"first token after \d", r"vllm:generation_tokens: \d+", r"_seconds: \d+ observations, mean"],
}


def test_every_example_is_run_and_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PROMISES)
    listed = re.findall(
        r"^- \[(\w+)\.py\]\((\w+)\.py\): ", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    assert listed == [(name, name) for name in PROMISES]


@pytest.mark.parametrize("name", PROMISES)
def test_example(name, smollm2_path):
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 40
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for promise in PROMISES[name]:
        assert re.search(promise, done.stdout), done.stdout
