"""What must be instant stays instant: nothing heavy is imported for `import octavo` and `octavo --help`."""

import resource
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "zmq",
    "jinja2",
    "yaml",
    "tqdm",
    "rich",
    "huggingface_hub",
)
MOST_MODULES = 420
"""Of octavo's own, in a start of the default model: some more than there are."""


def _modules_after(code):
    report = "import sys; print(' '.join(sys.modules), file=sys.stderr)"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import octavo",
        "import octavo; octavo.SamplingParams, octavo.ConfigError",
        "from octavo.cli.main import main; main([])",
        "from octavo.cli.main import main; main(['collect-env'])",
    ],
)
def test_nothing_heavy_is_imported(code):
    loaded = _modules_after(code)
    assert not loaded.intersection(HEAVY)
    assert "octavo" in loaded


def test_configuration_needs_no_torch():
    assert "torch" not in _modules_after("from octavo.config import resolve")


def test_text_needs_nothing_of_media():
    loaded = _modules_after("import octavo.frontend.async_engine, octavo.llm, octavo.serving.openai.speech")
    assert not loaded.intersection({"PIL", "av", "octavo.frontend.media.reader"})


def test_a_server_starts_its_core_before_it_loads_its_application():
    loaded = _modules_after("import octavo.serving.process.main_process")
    assert not loaded.intersection({"starlette.applications", "octavo.serving.app"})


@pytest.mark.parametrize(
    ("arguments", "limit_s"), [(["-c", "import octavo"], 0.1), (["-m", "octavo", "--help"], 0.3)]
)
def test_start_is_instant(arguments, limit_s):
    """Processor time, not wall time, so that a busy machine does not matter; the best of several runs."""
    assert _cpu_seconds(arguments) - _cpu_seconds(["-c", "pass"]) < limit_s


def _cpu_seconds(arguments):
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_the_default_model_needs_few_modules(smollm2_path):
    """Of octavo's own, up to the first tokens: what servers need stays away."""
    loaded = _modules_after(
        "from octavo import LLM, SamplingParams\n"
        f"llm = LLM({str(smollm2_path)!r}, max_model_len=512, kv_cache_memory_bytes=1 << 26)\n"
        "llm.generate('The sea', SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "llm.shutdown()"
    )
    own = {name for name in loaded if name.split(".")[0] == "octavo"}
    assert "octavo.serving.app" not in own
    assert 300 < len(own) <= MOST_MODULES
