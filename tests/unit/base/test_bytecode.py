"""Bytecode is kept where it has no other place, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

PROGRAM = """
import os, sys
from octavo.base.bytecode import kept_bytecode
from octavo.base.processes import child_environment
before = sys.pycache_prefix, sys.dont_write_bytecode
with kept_bytecode():
    import torch
    environment = child_environment()
assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
print(os.path.exists(torch.__cached__), torch.__cached__.startswith(os.environ["OCTAVO_CACHE_DIR"]))
print(environment.get("PYTHONPYCACHEPREFIX", "").startswith(os.environ["OCTAVO_CACHE_DIR"]))
"""


@pytest.mark.parametrize(
    ("forbidden", "is_there", "is_open", "printed"),
    [
        ("1", False, False, "True True True"),
        ("1", True, False, "True False False"),
        ("", False, False, "True False False"),
        ("1", False, True, "False False False"),
    ],
)
def test_where_it_is(tmp_path, forbidden, is_there, is_open, printed):
    source = tmp_path / "site" / "torch" / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    if is_open:
        (tmp_path / "cache" / "bytecode").mkdir(0o755, parents=True)
    if is_there:
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(source)], check=True)
    given = {
        "PYTHONPATH": f"{source.parents[1]}{os.pathsep}{Path(octavo.__file__).parents[1]}",
        "PYTHONDONTWRITEBYTECODE": forbidden,
        "OCTAVO_CACHE_DIR": str(tmp_path / "cache"),
    }
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == printed.split()


def test_what_a_script_imports_by_a_name_of_octavo(tmp_path):
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("")
    script = "import sys, octavo; print(sys.modules[octavo.SamplingParams.__module__].__cached__)"
    given = {
        "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{Path(octavo.__file__).parents[1]}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OCTAVO_CACHE_DIR": str(tmp_path / "cache"),
    }
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=variables | given, capture_output=True, text=True, check=True
    )
    kept = Path(done.stdout.strip())
    assert kept.exists() and kept.is_relative_to(tmp_path / "cache")
