"""Every script and notebook in examples/ runs on the default model and prints what it promises.

Scripts run in the tests' own process, the clients against one server whose model is told to reason first when
the template is asked to: so each takes a second.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs_pages import ADDRESS, ROOT
from tests.handmade_adapters import write_queries
from tests.served_process import ServeProcess

EXAMPLES = ROOT / "examples"
PROMISES = {
    "basic": [r"'The capital of France is' -> '.+'"],
    "chat": [r"assistant: .*Paris", r"[1-9]\d* of \d+ prompt tokens were cached"],
    "batch": [r'(\{"question": ".+", "answer": ".+", "ended_by": "(stop|length)"\}\n){3}', "Paris"],
    "structured_output": [
        r"choice:   (happy|sad)",
        r"regex:   \d{4}-\d\d-\d\d",
        r"'population': \d",
        "FROM users",
    ],
    "logprobs": [r"' Paris' with probability 0\.\d+ of \{' Paris'", r"(perplexity +\d+\.\d: .*\n){2}"],
    "prefix_caching": [r"cold: \d+ of", r"warm: [1-9]\d* of"],
    "async_streaming": [r"\[one\] '.+'", r"\[two\] '.+'"],
    "streaming_input": [r"capital of France is' -> ' Paris", r"is Paris.*\\nThe capital of Italy is' -> ' "],
    "beam_search": [r"1 group\(s\):\n( +-\d+\.\d\d  .+\n){3}3 group", r"Paris"],
    "custom_logits_processor": [r"free: '( blue){12}'", r"never_repeat: ' blue red", r"only: '( sun){12}'"],
    "data_parallel": ["from one to 9:", r"replica 0 answered [1-9]", r"replica 1 answered [1-9]"],
    "ray_data": [r"France is -> ' Paris.*\n.*Italy is -> ' Rome"],
    "ray_serve": [r"assistant: .*Paris"],
    "prefill_decode": [r"'.+' {'cached_tokens': [1-9]\d*}"],
    "priorities": [r"urgent: .*\n(also )?soon: .*\n(also )?soon: .*\nwhenever: "],
    "new_weights": [r"default: \[\d+.*\]\nstep 0: \[\d+.*\]\nstep 1: "],
    "metrics": [r"first token after \d", r"vllm:generation_tokens: \d+", r"_seconds: \d+ observations, mean"],
    "run_batch": [r"'The capital of France is' -> ' Paris", "exit status 0"],
    "quantize": [r"model.gguf: 211 matrices Q8_0\n", r"1\d\d MiB: The capital of France is' Paris"],
    "embeddings": [r"384 numbers", r"\n0\.\d+ Plants make sugar.*\n"],
    "images": [r"one: 20 tokens, 0 known.*\ntwo: 36 tokens.*\nthe first again: 20 tokens, 16 known"],
    "pooling": [r"\[32, 32, 32, 32\]", r"sparse: [1-9]\d* of", r"rerank: \[\d, \d, \d\]", r"reward: \(1,"],
    "speculative_decoding": [r"the same tokens: True; [1-9]\d* of \d+ guesses were right"],
    "server/chat": [r"assistant: .*Paris.*\nassistant: .+\n\d+ tokens in, \d+ out"],
    "server/streaming": [r".+\n\d+ tokens in [1-9]\d* pieces"],
    "server/completions": [r"(\d: '.+', first token's logprob -\d+\.\d\d\n){4}"],
    "server/tools": [r'call: get_weather {"city": "(Paris|Rome|Oslo)"}', r"assistant: \S"],
    "server/reasoning": [r"reasoning: \S.*", r"answer: \S"],
    "server/structured_output": [
        r"schema: name='.+' country='.+'",
        r"choice: (yes|no)\n",
        r"regex: 19\d\d\n",
    ],
    "server/responses": [r"first: .*Paris", r"second: \S", r"streamed: [1-9]\d* pieces, ."],
    "server/anthropic_client": [
        r"message: \S",
        r"pieces: \['.+'\]",
        r"call: \[\('get_weather', {'city': '.+'}\)\]",
    ],
    "server/batches": [r"colour-0 \S", r"colour-1 \S", r"colour-2 \S"],
    "server/concurrent_requests": [r"8 answers, \d+ tokens per second"],
    "server/adapters": [r"demo of smollm2: ['\"] .+", r"half of demo: ['\"] .+"],
    "server/embeddings": [r"3 vectors of 384\n[01]\.\d\d Plants make sugar"],
}
FAST = (
    "basic",
    "structured_output",
    "async_streaming",
    "quantize",
    "server/chat",
    "server/tools",
    "server/batches",
)
"""One of each topic; the others run with --whole."""
SCRIPTS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROMISES]
NOTEBOOKS = {
    "quickstart": [
        r"The capital of France is → .+",
        r"capital of France is Paris",
        r"[1-9]\d* of \d+ prompt tokens",
    ],
    "structured_extraction": [
        r"product +stars +mood\n(.+ [1-5] +(happy|angry|neutral)\n){3}",
        r"(positive|negative) +The",
    ],
}
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}"""
"""The default model's, with a door to reasoning, which a model of its size would not open by itself."""


@pytest.fixture(scope="module")
def server(smollm2_path, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    adapter = tmp_path_factory.mktemp("adapter")
    write_queries(adapter)
    options = "--chat-template", str(template), "--enable-lora", "--lora-modules", f"demo={adapter}"
    with ServeProcess(*options, program=["-m", "octavo", "serve"]) as server:
        yield server


@pytest.fixture(scope="module")
def encoder():
    with ServeProcess("minilm", program=["-m", "octavo", "serve"]) as server:
        yield server


def test_every_example_is_run_and_listed():
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    scripts = {name for name in scripts if not name.startswith("numpy_device/")}  # a package
    assert scripts == {f"{name}.py" for name in PROMISES}
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[([\w/]+)\.\w+\]\(([\w/]+)\.\w+\): ", text, re.MULTILINE)
    assert listed == [(name, name) for name in (*PROMISES, *NOTEBOOKS)]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", SCRIPTS)
def test_example(name, request, tmp_path, capsys):
    script = EXAMPLES / f"{name}.py"
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    if name.startswith("server/"):
        assert ADDRESS in text
        fixture = "encoder" if name == "server/embeddings" else "server"
        script = tmp_path / script.name
        script.write_text(text.replace(ADDRESS, request.getfixturevalue(fixture).url), encoding="utf-8")
    else:
        request.getfixturevalue("smollm2_path")
    if name.startswith("ray_"):
        printed = run_with_ray(script)
    else:
        runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr().out
    for promise in PROMISES[name]:
        assert re.search(promise, printed), printed


def run_with_ray(script, *arguments):
    """What it prints, in a process of its own: Ray stays in a process, and warns a lot."""
    pytest.importorskip("ray")
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_ranks_that_ray_places(tiny_llama):
    """The tokens are one device's; nothing is left in the cluster; too many ranks are refused."""
    printed = run_with_ray(ROOT / "tests/ray_ranks.py", tiny_llama)
    assert "equal: True\ngroups left: 0\n" in printed
    assert "The number of required CPUs (6) exceeds the total number of available CPUs in the Ray" in printed


@pytest.mark.matrix
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name, smollm2_path, tmp_path, monkeypatch):
    """Its cells run in a kernel; what they print is right, and progress bars are widgets."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    for promise in NOTEBOOKS[name]:
        assert re.search(promise, printed), printed
    widgets = [o.data for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert widgets, json.dumps(outputs)[:2000]


def test_notebooks_name_the_kernel_that_everybody_has():
    for name in NOTEBOOKS:
        notebook = nbformat.read(Path(EXAMPLES, f"{name}.ipynb"), as_version=4)
        assert notebook.metadata.kernelspec.name == "python3"
