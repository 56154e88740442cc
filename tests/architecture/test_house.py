"""The rules of the house that no linter knows, held by reading the source."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import octavo
from octavo.base.registry import Registry, load_object
from octavo.cli.main import COMMANDS
from octavo.names.table import TOP
from tools import check_size

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "octavo").rglob("*.py"))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}

CORES = (
    "octavo/engine/core.py",
    "octavo/engine/scheduler/scheduler.py",
    "octavo/runtime/worker/model_runner.py",
)
FEATURES = (
    *(
        "lora",
        "adapter",
        "eagle",
        "ngram",
        "draft",
        "grammar",
        "gptq",
        "expert",
        "llava",
        "media",
        "embed",
        "pool",
    ),
    *("cuda", "graph", "call_log", "host_tokens"),
)


def _lint_imports(folder):
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())",
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_import_contracts_hold():
    pytest.importorskip("importlinter")
    done = _lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("octavo.cli.pull", "octavo.runtime.batch"),
        ("octavo.runtime.models.opt", "octavo.runtime.kernels.table"),
    ],
)
def test_import_contracts_would_notice(tmp_path, importer, imported):
    """The contracts are alive: one forbidden import, and they fail."""
    pytest.importorskip("importlinter")
    shutil.copytree(
        ROOT / "octavo", tmp_path / "octavo", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / f"{importer.replace('.', '/')}.py").open("a") as file:
        file.write(f"\nimport {imported}\n")
    done = _lint_imports(tmp_path)
    assert done.returncode != 0
    assert f"{importer} -> {imported}" in done.stdout


@pytest.mark.parametrize("name", CORES)
def test_the_core_knows_numbers_not_features(name):
    path = ROOT / name
    words = set(re.findall("|".join(FEATURES), path.read_text(encoding="utf-8").lower()))
    assert not words


def test_batches_are_made_in_one_way():
    """By their constructor: there are no others, and nothing derives from it."""
    others = re.compile(r"ForwardBatch\.\w+\(|\(ForwardBatch\):")
    paths = (*SOURCES, *ROOT.glob("tests/**/*.py"))
    assert [path for path in paths if others.search(path.read_text("utf-8"))] == []


def test_files_and_functions_fit():
    assert list(check_size.oversized()) == []


def test_a_budget_would_be_noticed(tmp_path, monkeypatch):
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo/small.py").write_text("x = 1\n" * 3)
    (tmp_path / "octavo/page.js").write_text("x;\n" * 2)
    assert check_size.totals(tmp_path) == {"Python": 3, "C++ and web": 2}
    monkeypatch.setitem(check_size.BUDGETS, "Python", 2)
    assert list(check_size.oversized(tmp_path)) == ["octavo/: 3 lines of Python, at most 2"]


def test_sizes_would_be_noticed(tmp_path):
    (tmp_path / "octavo").mkdir()
    body = "".join(f"    x{i} = {i}\n" for i in range(60))
    (tmp_path / "octavo/long.py").write_text("def f():\n" + body + "\n" * 400)
    faults = list(check_size.oversized(tmp_path))
    assert faults == ["octavo/long.py: 461 lines, at most 400", "octavo/long.py:1 f: 61 lines, at most 60"]


FORBIDDEN_MODULES = {"pickle", "dill", "marshal", "cloudpickle", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load"}


def _dangers(tree):
    """What could run foreign code: pickles, eval, exec, torch.load, remote code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
                yield called
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) == "True":
                    yield "trust_remote_code=True"


def test_nothing_runs_foreign_code():
    assert {name: found for name, tree in TREES.items() if (found := list(_dangers(tree)))} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "eval('1')", "torch.load(f)", "f(trust_remote_code=True)"],
)
def test_foreign_code_would_be_noticed(source):
    assert list(_dangers(ast.parse(source)))


def test_types_live_on_the_right_floor():
    """No import of our own modules for type checkers only: it would hide a cycle."""
    for name in set(TREES) - {"octavo/__init__.py"}:
        assert list(_hidden_imports(TREES[name])) == [], name


def _hidden_imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("octavo"):
                    yield inner.module
                if isinstance(inner, ast.Import):
                    yield from (alias.name for alias in inner.names if alias.name.startswith("octavo"))


def test_everything_public_says_what_it_is():
    silent = []
    for name, tree in TREES.items():
        if tree.body and not ast.get_docstring(tree):
            silent.append(name)
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            overload = any(ast.unparse(d) == "overload" for d in node.decorator_list) if public else False
            if public and not overload and not ast.get_docstring(node):
                silent.append(f"{name}: {node.name}")
    assert silent == []


HAS_TRITON = importlib.util.find_spec("triton") is not None


def _modules():
    for module in pkgutil.walk_packages(octavo.__path__, "octavo."):
        needs_triton = module.name.startswith("octavo.runtime.kernels.triton.")
        if not module.name.endswith("__main__") and (HAS_TRITON or not needs_triton):
            yield module.name


def test_every_public_method_says_what_it_does():
    """A method that overrides another needs no words of its own where it does just what that one says."""
    silent = []
    for name in _modules():
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and kind.__module__ == name and not kind.__name__.startswith("_"):
                silent += [f"{name}: {kind.__name__}.{method}" for method in _methods_without_words(kind)]
    assert silent == []


def _methods_without_words(kind):
    homes = [base for base in kind.__mro__ if base.__module__.startswith("octavo.")]
    for name, member in vars(kind).items():
        function = inspect.unwrap(member.fget if isinstance(member, property) else member)
        function = getattr(function, "__func__", function)
        if name.startswith("_") or not isinstance(function, types.FunctionType):
            continue
        written_there = function.__module__ == kind.__module__ and function.__qualname__.endswith(f".{name}")
        if written_there and not any(getattr(vars(home).get(name), "__doc__", None) for home in homes):
            yield name


def test_a_method_without_words_is_found():
    class Spoken:
        def said(self):
            """Is said."""

        @property
        def silent_property(self):
            return 1

        @classmethod
        def silent_maker(cls):
            return cls()

    class Heard(Spoken):
        def said(self):
            return 1

        def silent(self):
            return 2

    Spoken.__module__ = Heard.__module__ = "octavo.example"
    for kind in (Spoken, Heard):
        for member in vars(kind).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType):
                function.__module__ = "octavo.example"
    assert list(_methods_without_words(Spoken)) == ["silent_property", "silent_maker"]
    assert list(_methods_without_words(Heard)) == ["silent"]


def test_every_registry_name_loads():
    registries = {}
    for name in _modules():
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, Registry):
                registries[id(value)] = value
    for registry in registries.values():
        for name in registry.names():
            assert registry.load(name) is not None, f"{registry.family} {name}"


def test_every_public_name_loads():
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert set(octavo.__all__) == set(TOP) | {"__version__"}
    assert set(dir(octavo)) == set(octavo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = octavo.Nonsense


def test_type_checkers_see_the_names_that_users_get():
    """The table of homes and the imports for type checkers are the same."""
    seen = {}
    for node in ast.walk(TREES["octavo/__init__.py"]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("octavo."):
            seen |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    for name in ("__version__", "Finder", "names_of"):
        del seen[name]
    assert seen == TOP


def test_every_command_loads():
    for command in COMMANDS.values():
        for function in ("configure", "run"):
            assert callable(load_object(f"{command.module}:{function}"))


@pytest.mark.slow
def test_unit_tests_of_messages_pass_without_asserts():
    """`python -O` strips assert statements: none of our checks of input may be one."""
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ignored = ["-W", "ignore::pytest.PytestConfigWarning"]
    done = subprocess.run(
        [*command, *ignored, "tests/unit/messages"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
