"""Building the kernels: once, side by side, without a compiler, with one that fails."""

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.runtime.kernels import build
from octavo.runtime.kernels.cpu.table import cpu_table

# A compiler that is quick, and that notes each library it links.
FAKE_COMPILER = """#!/bin/sh
case "$*" in *--version*) echo fake 1.0; exit 0;; esac
case "$*" in *-shared*) echo linked >> "$(dirname "$0")/links"; sleep 0.2;; esac
while [ $# -gt 1 ]; do shift; done
echo library > "$1"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_NO_CPU_KERNELS", raising=False)
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    return tmp_path


def use_compiler(home: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = home / "compiler"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_built_once_then_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    first = build.shared_library()
    assert first is not None and first.read_text() == "library\n"
    assert build.shared_library() == first
    assert (home / "links").read_text() == "linked\n"
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, "lock"])


def test_builds_at_the_same_time_make_one_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    command = [sys.executable, "-m", "octavo.runtime.kernels.build"]
    with ThreadPoolExecutor(3) as pool:
        results = list(
            pool.map(lambda _: subprocess.run(command, capture_output=True, check=False), range(3))
        )
    assert [r.returncode for r in results] == [0, 0, 0]
    assert (home / "links").read_text() == "linked\n"


def test_another_cpu_or_compiler_is_another_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    first = build.shared_library()
    use_compiler(home, monkeypatch, FAKE_COMPILER.replace("1.0", "2.0"))
    second = build.shared_library()
    monkeypatch.setattr(build, "_cpu_features", lambda: "x86_64 flags : fpu")
    third = build.shared_library()
    assert len({first, second, third}) == 3


def test_no_compiler_means_twins_and_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu_table(1).name == "ref"
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text and "CXX" in caplog.text


def test_no_compiler_but_a_library_for_this_cpu(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    built = build.shared_library()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.shared_library() == built


def test_a_failing_compiler_is_quoted(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_compiler(
        home, monkeypatch, '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no vector unit >&2\nexit 1\n'
    )
    assert cpu_table(1).name == "ref"
    assert "no vector unit" in caplog.text


def test_disabled_kernels(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NO_CPU_KERNELS", "1")
    monkeypatch.setenv("CXX", "must-not-be-called")
    assert cpu_table(1).name == "ref"
    assert not (home / "cache").exists()


def test_portable_build_passes_the_same_arithmetic(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources also serve CPUs without AVX2: built for the plain architecture they equal the twins."""
    script = (
        "import torch\n"
        "from octavo.runtime.kernels import build\n"
        "build._OPTIONS = [o for o in build._OPTIONS if not o.startswith('-march')] + ['-O0']\n"
        "from octavo.runtime.kernels.cpu.table import cpu_table\n"
        "from octavo.runtime.kernels.ref.table import ref_table\n"
        "from tests.kernel_cases import CASES, assert_close, run\n"
        "table = cpu_table(2)\n"
        "assert table.name == 'cpu'\n"
        "for op, cases in CASES.items():\n"
        "    for case in list(cases())[::5]:\n"
        "        for a, b in zip(run(table, op, case), run(ref_table(), op, case), strict=True):\n"
        "            assert_close(a, b, case.tolerance, f'{op} {case.name}')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
