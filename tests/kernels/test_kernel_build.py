"""Building the kernels: once, side by side, without a compiler, with one that fails."""

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from octavo.base import ownership
from octavo.base.errors import ConfigError
from octavo.runtime.kernels import build, variants
from octavo.runtime.kernels.activations import Activation
from octavo.runtime.kernels.cpu.proof import disagreements
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.ref.table import ref_table

# A compiler that is quick, and that notes each library it links.
PASSED = "this"  # a module that runs and says nothing against a library
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
    monkeypatch.setattr(build, "_PROOF", PASSED)
    return tmp_path


def fail_proofs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the next proofs fail."""
    really, left = build._run, iter(range(count))

    def run(command: list[str]) -> str:
        if PASSED in command and next(left, None) is not None:
            raise subprocess.CalledProcessError(
                1, command, stderr="paged_attention differs from its reference"
            )
        return really(command)

    monkeypatch.setattr(build, "_run", run)


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
    script = f"from octavo.runtime.kernels import build; build._PROOF = {PASSED!r}; build.main()"
    command = [sys.executable, "-c", script]
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
    monkeypatch.setattr(build, "cpu_features", lambda: "x86_64 flags : fpu")
    third = build.shared_library()
    assert len({first, second, third}) == 3


def test_no_compiler_means_twins_and_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu_table(1).name == "ref"
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text and "CXX" in caplog.text
    assert "0.1 tokens/s" in caplog.text and "apt-get install g++" in caplog.text


def test_no_compiler_but_a_library_for_this_cpu(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    built = build.shared_library()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.shared_library() == built


def writable_by_all(path: Path) -> None:
    path.chmod(0o777)


def a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


@pytest.mark.parametrize("spoil", [writable_by_all, a_link])
@pytest.mark.parametrize("what", ["folder", "library"])
@pytest.mark.parametrize("compiler", ["there", "gone"])
def test_a_cache_that_others_can_write_is_not_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], what: str, compiler: str
) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    built = build.shared_library()
    assert built is not None
    spoil(built if what == "library" else built.parent)
    if compiler == "gone":
        monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"written by others.*OCTAVO_CACHE_DIR"):
        build.shared_library()


def test_a_cache_of_somebody_else_is_not_loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    built = build.shared_library()
    assert built is not None
    monkeypatch.setattr(ownership.os, "geteuid", lambda: 12345)
    owner = os.getuid()
    if owner == 0:  # what root has put there is trusted
        assert build.shared_library() == built
        os.chown(built.parent, 4321, -1)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        build.shared_library()


def test_what_is_made_is_closed_to_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    before = os.umask(0)
    try:
        built = build.shared_library()
    finally:
        os.umask(before)
    assert built is not None
    assert {stat.S_IMODE(path.stat().st_mode) for path in (built, built.parent)} == {0o700}


def ship(home: Path, monkeypatch: pytest.MonkeyPatch, *names: str, sources: str = "") -> dict[str, Path]:
    """Have these variants in the installed package, and no compiler."""
    monkeypatch.setattr(variants, "FOLDER", home)
    monkeypatch.setenv("CXX", "no-such-compiler")
    paths = {name: variants.library(home, name, sources or build._sources()) for name in names}
    for path in paths.values():
        path.write_text("library")
    return paths


def use_cpu(monkeypatch: pytest.MonkeyPatch, features: str) -> None:
    monkeypatch.setattr(build, "cpu_features", lambda: f"x86_64 flags : fpu {features}")


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (variants.VARIANTS["amx"].features, "amx"),
        (variants.VARIANTS["avx512"].features + " avx512_bf16", "avx512_bf16"),
        (variants.VARIANTS["avx512"].features, "avx512"),
        (variants.VARIANTS["avx512"].features.replace("avx512_vnni", ""), "avx2"),
        (variants.VARIANTS["avx2"].features + " avx512f avx512_vnni", "avx2"),
        ("sse4_2 avx", None),
    ],
)
def test_of_the_libraries_that_came_with_the_wheel_the_best_for_the_cpu_is_taken(
    features: str, name: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = ship(home, monkeypatch, *variants.VARIANTS)
    use_cpu(monkeypatch, features)
    assert build.shared_library() == (shipped[name] if name else None)


def test_a_library_that_came_with_the_wheel_proves_right_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = ship(home, monkeypatch, "avx512", "avx2")
    use_cpu(monkeypatch, variants.VARIANTS["avx512"].features)
    fail_proofs(monkeypatch, 1)
    assert build.shared_library() == shipped["avx2"]
    assert "CPU kernels for avx512 are wrong on this machine" in caplog.text
    assert build.shared_library() == shipped["avx512"], "it is asked again"
    fail_proofs(monkeypatch, 9)
    assert build.shared_library() == shipped["avx512"], "it is not asked again"
    use_cpu(monkeypatch, variants.VARIANTS["amx"].features)
    assert build.shared_library() is None, "on another CPU it is"


def test_a_library_of_other_sources_is_not_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(home, monkeypatch, *variants.VARIANTS, sources="0123456789abcdef")
    assert build.shared_library() is None


@pytest.mark.parametrize(
    ("system", "machine", "linking"),
    [
        ("linux", "", "-static-libstdc++"),
        ("linux", "aarch64", "--gc-sections"),
        ("macos", "arm64", "-dead_strip"),
    ],
)
def test_every_variant_is_made_for_a_wheel(
    system: str, machine: str, linking: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER.replace("linked >>", '"$*" >>'))
    made = build.make_variants(home, system, machine)
    expected = variants.OF_MACHINE[machine] if machine else variants.VARIANTS
    assert [path.name.rpartition("-")[0] for path in made] == list(expected)
    assert all(path.read_text() == "library\n" for path in made)
    links = (home / "links").read_text().splitlines()
    for line, variant in zip(links, expected.values(), strict=True):
        assert linking in line and all(option in line for option in variant.options)


@pytest.mark.parametrize(
    ("features", "name"),
    [
        ("asimd atomics asimdhp asimdrdm asimddp sve i8mm bf16", "bf16"),
        ("asimd atomics asimdhp asimdrdm asimddp i8mm", "i8mm"),
        ("asimd atomics asimdhp asimdrdm asimddp", "dotprod"),
        ("asimd", "neon"),
    ],
)
def test_an_arm_cpu_has_its_level(features: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CPU_ISA", raising=False)
    monkeypatch.setattr(variants, "VARIANTS", variants.OF_MACHINE["aarch64"])
    monkeypatch.setattr(build, "_MARCHES", ())
    monkeypatch.setattr(build, "cpu_features", lambda: f"aarch64 {features}")
    assert build.chosen_level() == (name, "the best of this CPU")
    assert build._marches()[0] == variants.OF_MACHINE["aarch64"][name].options


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


@pytest.mark.slow
def test_portable_build_passes_the_same_arithmetic(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources also serve CPUs without AVX2: built for plain x86-64 they equal the references."""
    script = (
        "import torch\n"
        "from octavo.runtime.kernels import build\n"
        "build._OPTIONS, build._MARCHES = [*build._OPTIONS, '-O0'], ('x86-64',)\n"
        "from octavo.runtime.kernels.cpu.table import cpu_table\n"
        "from octavo.runtime.kernels.ref.table import ref_table\n"
        "from tests.kernel_cases import CASES, OPS, assert_close, run\n"
        "table = cpu_table(2)\n"
        "assert table.name == 'cpu'\n"
        "for op in OPS:\n"
        "    torch.manual_seed(1)\n"
        "    for case in list(CASES[op]())[::5]:\n"
        "        for a, b in zip(run(table, op, case), run(ref_table(), op, case), strict=True):\n"
        "            assert_close(a, b, case.tolerance, f'{op} {case.name}')\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_library_that_is_wrong_here_gives_way_to_a_plainer_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    fail_proofs(monkeypatch, 1)
    monkeypatch.setattr(build, "_MARCHES", ("native", "x86-64-v3"))
    assert build.shared_library() is not None
    assert (home / "links").read_text() == "linked\n" * 2
    assert "paged_attention differs" in caplog.text


def test_where_all_are_wrong_the_twins_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(home, monkeypatch, FAKE_COMPILER)
    fail_proofs(monkeypatch, len(build._MARCHES))
    assert build.shared_library() is None


def test_the_proof_finds_what_is_wrong() -> None:
    table = cpu_table(1)
    assert list(disagreements(table, ref_table())) == []

    def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
        return table.activate(x, "gelu_tanh" if activation == "gelu" else activation, gated=gated)

    linear = replace(table.linear, block_matmul=lambda *args: -table.linear.block_matmul(*args))
    wrong = replace(table, activate=activate, linear=linear)
    names = list(disagreements(wrong, ref_table()))
    assert "gelu, gated: False" in names and "block_matmul of Q8_0, float32, 1 rows" in names
