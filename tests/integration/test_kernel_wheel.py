"""The platform wheel: without a compiler its kernels run, and give the tokens of those that are built.

Runs with --whole alone; tests/kernels/test_kernel_build.py has the parts.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from octavo.runtime.kernels import build, variants
from tests import mach_o
from tests.shared_objects import share_objects

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["The capital of France is", "One, two, three,"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """With the variant for this CPU alone, whose files other tests compile too."""
    best = [name for name, variant in variants.VARIANTS.items() if variant.runs_on(build.cpu_features())]
    if not best:
        pytest.skip("needs an x86-64 CPU with AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "VARIANTS", {best[0]: variants.VARIANTS[best[0]]})
        patch.setenv("OCTAVO_WHEEL_KERNELS", "1")
        share_objects(patch, tmp_path_factory)
        folder = tmp_path_factory.mktemp("dist")
        return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def tokens(tmp_path, **environment):
    script = (
        "from octavo import LLM, SamplingParams\n"
        f"for output in LLM('smollm2').generate({PROMPTS!r}, SamplingParams(temperature=0, max_tokens=12)):\n"
        "    print(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_it_runs_without_a_compiler_and_gives_the_same_tokens(wheel, tmp_path, smollm2_path):
    assert re.search(r"-py3-none-manylinux_2_\d\d_x86_64\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        assert (
            "Root-Is-Purelib: false"
            in archive.read(next(name for name in archive.namelist() if name.endswith("/WHEEL"))).decode()
        )
    own, _ = tokens(tmp_path, PYTHONPATH=str(ROOT))
    (tmp_path / "bin").mkdir()
    without = {"PATH": str(tmp_path / "bin"), "CXX": "", "OCTAVO_CACHE_DIR": str(tmp_path / "cache")}
    shipped, log = tokens(tmp_path, PYTHONPATH=str(tmp_path / "site"), OCTAVO_LOGGING_LEVEL="INFO", **without)
    assert shipped == own and "no CPU kernels" not in log
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".proved"]


ZIG = """#!{python}
# clang for macOS by the package ziglang, which calls processors by name.
import os, sys
CPUS = {{"+bf16": "apple_m2", "+i8mm": "apple_m1+i8mm", "+dotprod": "apple_m1", "": "apple_a7"}}
for at, word in enumerate(sys.argv):
    if word.startswith("-march"):
        sys.argv[at] = f"-mcpu={{next(cpu for end, cpu in CPUS.items() if word.endswith(end))}}"
os.execv({zig!r}, [{zig!r}, "c++", "-target", "aarch64-macos.11.0", *sys.argv[1:]])
"""


@pytest.mark.opt_in("OCTAVO_TEST_ZIG")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_for_macos_has_what_its_loader_asks_for(tmp_path, monkeypatch):
    """OCTAVO_TEST_ZIG is the program zig of the package ziglang. Minutes."""
    compiler = tmp_path / "clang++"
    compiler.write_text(ZIG.format(python=sys.executable, zig=os.environ["OCTAVO_TEST_ZIG"]))
    compiler.chmod(0o755)
    for name, value in (("KERNELS", "1"), ("TARGET", "macos-arm64")):
        monkeypatch.setenv(f"OCTAVO_WHEEL_{name}", value)
    monkeypatch.setenv("CXX", str(compiler))
    wheel = Path(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])))
    assert wheel.name.endswith("-py3-none-macosx_11_0_arm64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    levels, exports = {}, {True: set(), False: set()}
    for source in (ROOT / "octavo/runtime/kernels/cpu").glob("*.cpp"):
        names = re.findall(r"^OCTAVO_EXPORTED\((\w+)\)", source.read_text(), re.M)
        exports[source.name == "matmul_bf16.cpp"].update(names)
    for path in (tmp_path / "site" / "octavo/runtime/kernels/cpu/built").iterdir():
        library = mach_o.read(path)
        assert library.oldest_macos == (11, 0)
        assert library.needs <= {"/usr/lib/libSystem.B.dylib", "/usr/lib/libc++.1.dylib"}
        assert not library.undefined & {"getauxval", "syscall", "sched_setaffinity", "GOMP_parallel"}
        for name in exports[False]:
            assert {f"{name}_checked", f"{name}_recorded", f"{name}_letters"} <= library.exported
        assert {"octavo_replay", "octavo_bf16_products"} <= library.exported
        levels[path.name.partition("-")[0]] = {n for n in exports[True] if f"{n}_checked" in library.exported}
    assert set(levels) == set(variants.OF_MACHINE["arm64"])
    assert {name for name, found in levels.items() if found} == {"bf16"}
