"""What runs without --whole, and that everything has a test which does."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.selection import asked_for, runs_on_gpu

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("tests/**/test_*.py"))
SLOW = re.compile(r"pytest\.mark\.slow\b")


def is_slow(tree):
    """Whether each test of a module waits for --whole."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    each = [any(SLOW.match(ast.unparse(mark)) for mark in test.decorator_list) for test in tests]
    return any(SLOW.search(ast.unparse(mark)) for mark in marks) or (bool(each) and all(each))


def test_slow_modules_name_a_quick_one():
    """Of the same mechanism: its parts, or a smaller case."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    slow = {path for path, tree in trees.items() if is_slow(tree)}
    assert 3 < len(slow) < len(FILES) / 10
    for path in slow:
        named = re.findall(r"tests/[\w/]+\.py", ast.get_docstring(trees[path]) or "")
        assert {ROOT / name for name in named} & (set(FILES) - slow), f"{path.name}: which test does without?"


def case(nodeid, **marks):
    marks = {name: SimpleNamespace(args=args) for name, args in marks.items()}
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=marks.get)


def names(items, whole):
    return [item.nodeid for item in asked_for(items, whole)]


def test_of_a_matrix_the_first_and_one_in_n_run():
    cases = [case(f"test_it[{number}]", matrix=(4,)) for number in range(400)]
    some = names(cases, False)
    assert some[0] == "test_it[0]" and 60 < len(some) < 140
    assert names(cases[:50], False) == [name for name in some if int(name[8:-1]) < 50]
    assert len(names(cases, True)) == 400
    firsts = [case(f"test_{function}[{number}]", matrix=()) for function in "ab" for number in range(50)]
    assert names(firsts, False) == ["test_a[0]", "test_b[0]"]


def test_slow_ones_wait_for_the_whole_and_measurements_for_their_variable(monkeypatch):
    cases = [case("test_a"), case("test_b", slow=()), case("test_c", opt_in=("OCTAVO_TEST_NOTHING",))]
    assert names(cases, False) == ["test_a"]
    assert names(cases, True) == ["test_a", "test_b"]
    monkeypatch.setenv("OCTAVO_TEST_NOTHING", "1")
    assert names(cases, False) == ["test_a", "test_c"]
    begun = [case("test_d[0]", slow=(), matrix=(9,)), case("test_d[1]", matrix=(9,))]
    assert names(begun, False) == ["test_d[1]"], "the first that is not slow"


def test_kernels_that_take_the_gpu_are_found():
    """`-m gpu` runs them; what is compiled for CPUs, or tested without a device, does not count."""
    devices = {"cuda": True, "cpu": False, None: False}
    modules = {device: SimpleNamespace(DEVICE=device) for device in devices}
    assert {device: runs_on_gpu(SimpleNamespace(module=modules[device])) for device in devices} == devices
    assert not runs_on_gpu(SimpleNamespace(module=SimpleNamespace())) and not runs_on_gpu(SimpleNamespace())


@pytest.mark.parametrize("text", ["pytestmark = pytest.mark.slow", "@pytest.mark.slow\ndef test_a(): ..."])
def test_slow_modules_are_found(text):
    assert is_slow(ast.parse(text + "\n"))
    assert not is_slow(ast.parse(text + "\ndef test_b(): ...\n")) or text.startswith("pytestmark")
