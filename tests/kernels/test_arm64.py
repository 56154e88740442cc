"""ARM64 under an emulator: kernels of every level are right, integers to the bit, and a model's tokens, too.

OCTAVO_TEST_ARM64 names the folder that tools/arm64_system.py has made: Python and torch for AArch64. Minutes.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.runtime.kernels import build, variants
from tests import arm64_products
from tests.shared_objects import share_objects

ROOT = Path(__file__).resolve().parents[2]
BEST = {"cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "bf16"}
"""The level that a CPU's features lead to."""
RUN = (("neoverse-n1", "neon"), ("neoverse-n1", "dotprod"), ("max,sve=off", "i8mm"), ("max,sve=off", "bf16"))
"""torch itself asks for more than a Cortex-A72 has, and is slow where SVE is emulated."""
PROMPT = "The capital of France is"
TOKENS = """
import json, sys
from octavo import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=16)
print(json.dumps(LLM("smollm2", max_model_len=256).generate([sys.argv[1]], params)[0].outputs[0].token_ids))
"""

pytestmark = [pytest.mark.opt_in("OCTAVO_TEST_ARM64"), pytest.mark.timeout(3600)]


def command(cpu: str) -> list[str]:
    """AArch64's Python on a CPU."""
    root = Path(os.environ["OCTAVO_TEST_ARM64"], "root")
    return ["qemu-aarch64", "-L", str(root), "-cpu", cpu, str(root / "usr/bin/python3")]


def emulated(cpu: str, *arguments: str, **environment: str) -> str:
    """Run AArch64's Python on a CPU; return what it prints."""
    site = Path(os.environ["OCTAVO_TEST_ARM64"], "site")
    paths = [str(ROOT), str(site), *(path for path in sys.path if path.endswith("site-packages"))]
    done = subprocess.run(
        [*command(cpu), "-P", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The library of each level, and of AVX2."""
    folder = tmp_path_factory.mktemp("arm64")
    with pytest.MonkeyPatch.context() as patch:
        share_objects(patch, tmp_path_factory)
        patch.setenv("CXX", "aarch64-linux-gnu-g++")
        made = build.make_variants(folder, "linux", "aarch64")
        patch.setenv("CXX", "g++")
        patch.setitem(variants.OF_MACHINE, "x86_64", {"avx2": variants.OF_MACHINE["x86_64"]["avx2"]})
        made += build.make_variants(folder, "linux", "x86_64")
    return {path.name.partition("-")[0]: path for path in made}


@pytest.mark.parametrize("cpu", BEST)
def test_hwcap_chooses_the_level(cpu: str) -> None:
    script = "from octavo.runtime.kernels import build; print(*build.chosen_level(), build._marches()[0])"
    expected = f"{BEST[cpu]} the best of this CPU {variants.OF_MACHINE['aarch64'][BEST[cpu]].options}"
    assert emulated(cpu, "-c", script).strip() == expected


@pytest.mark.parametrize(("cpu", "level"), RUN)
def test_every_kernel_agrees_with_its_reference(cpu: str, level: str, libraries: dict[str, Path]) -> None:
    emulated(cpu, "-m", "octavo.runtime.kernels.cpu.proof", str(libraries[level]))


@pytest.mark.parametrize(("cpu", "level"), RUN)
def test_products_of_integers_have_the_bits_of_x86(
    cpu: str, level: str, libraries: dict[str, Path], tmp_path: Path
) -> None:
    arm64_products.main([str(libraries["avx2"]), str(tmp_path / "x86.npz")])
    emulated(cpu, "-m", "tests.arm64_products", str(libraries[level]), str(tmp_path / "arm.npz"))
    here, there = (np.load(tmp_path / name) for name in ("x86.npz", "arm.npz"))
    assert set(here) == set(there) and len(here.files) > 100
    assert not np.array_equal(here["Q4_1 int8 4"], there["Q4_1 int16 4"], equal_nan=True)
    differing = [name for name in here if not np.array_equal(here[name], there[name], equal_nan=True)]
    assert not differing


INVARIANT = """
import sys
from pathlib import Path
from octavo.runtime.kernels.cpu.library import Library, Products
from octavo.runtime.kernels.cpu.table import table_of
from tests.kernels import test_cpu_levels as levels
library = Library(Path(sys.argv[1]))
assert library.bfloat16_products == Products.DOTS
level = "bf16", {threads: table_of(library, threads) for threads in (1, 2)}
for name in ("BF16", "Q4_1", "Q6_K"):
    levels.test_rows_threads_and_places_change_no_bit(level, name, "bfloat16")
for rows in (1, 3, 40):
    levels.test_gated_is_product_and_gate(level, rows)
levels.test_a_row_may_end_anywhere(level)
"""


def test_rows_in_bfloat16_have_the_same_bits_in_any_batch(libraries: dict[str, Path]) -> None:
    emulated("max,sve=off", "-c", INVARIANT, str(libraries["bf16"]))


def test_the_default_model_gives_the_tokens_of_x86(libraries: dict[str, Path], tmp_path: Path) -> None:
    """The libraries lie where the wheel for AArch64 puts them; there is no compiler."""
    cache = {"OCTAVO_CACHE_DIR": str(tmp_path / "cache"), "OCTAVO_CPU_ISA": "avx2"}
    own = subprocess.run(
        [sys.executable, "-P", "-c", TOKENS, PROMPT],
        env=os.environ | cache | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    python = tmp_path / "python"  # how it starts itself: the system here cannot run it
    python.write_text(f'#!/bin/sh\nexec {shlex.join(command("neoverse-n1"))} "$@"\n')
    python.chmod(0o755)
    script = (
        f"import sys\nsys.executable = {str(python)!r}\n"
        "from pathlib import Path\nfrom octavo.runtime.kernels import variants\n"
        f"variants.FOLDER = Path({str(libraries['dotprod'].parent)!r})\n"
    )
    shipped = {"OCTAVO_CACHE_DIR": str(tmp_path / "there"), "CXX": "none"}
    there = emulated("neoverse-n1", "-c", script + TOKENS, PROMPT, **shipped)
    tokens = json.loads(there.splitlines()[-1])
    assert len(tokens) == 16 and tokens == json.loads(own.stdout.splitlines()[-1])
