"""Child processes: exit codes, output, import path, independence of the starting thread."""

import os
import sys
import threading

from octavo.base.processes import Child, cpu_seconds
from tests.process_fakes import is_alive, wait_until


def run(statements, **options):
    """A child that runs Python statements, and the list that gets its exit code."""
    codes = []
    return Child("tests.child", statements, on_exit=codes.append, **options), codes


def test_exit_code():
    child, codes = run("import os; os._exit(7)")
    child.end(10)
    assert codes == [7]


def test_end_kills_what_does_not_end():
    child, codes = run("import time; time.sleep(60)")
    child.end(0.05)
    child.end(0.05)
    assert codes == [-9]
    assert not is_alive(child.pid)


def test_output_goes_to_standard_error_and_there_is_no_input(capfd):
    child, _ = run("import sys; print('said', repr(sys.stdin.read()))")
    child.end(10)
    captured = capfd.readouterr()
    assert captured == ("", "said ''\n")


def test_environment(monkeypatch, capfd):
    monkeypatch.setenv("SET_BY_USER", "user")
    child, _ = run(
        "import os; print(os.environ['SET_BY_USER'], os.environ['UNSET'])",
        environment={"SET_BY_USER": "default", "UNSET": "default"},
    )
    child.end(10)
    assert "user default" in capfd.readouterr().err


def test_import_path_is_the_parents_and_nothing_else(tmp_path, monkeypatch, capfd):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "only_here.py").write_text("")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "on_path.py").write_text("")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "path")])
    statement = (
        "from importlib.util import find_spec; print(*(bool(find_spec(m)) for m in ('on_path', 'only_here')))"
    )
    run(statement)[0].end(10)
    assert "True False" in capfd.readouterr().err
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    run(statement)[0].end(10)
    assert "True True" in capfd.readouterr().err


def test_a_child_outlives_the_thread_that_started_it():
    started = []
    thread = threading.Thread(target=lambda: started.append(run("import time; time.sleep(60)")))
    thread.start()
    thread.join()
    child, codes = started[0]
    assert not wait_until(lambda: codes, 0.5)
    child.end(0)


GUARDED = """
import os, sys, time
from pathlib import Path
from octavo.base.processes import die_with_parent
die_with_parent({parent}, Path({marker!r}).touch)
time.sleep(60)
"""


def test_a_child_whose_parent_has_gone_before_it_could_look(tmp_path):
    marker = tmp_path / "last act"
    child, codes = run(GUARDED.format(parent=os.getppid(), marker=str(marker)))
    child.end(10)
    assert codes == [1]
    assert marker.exists()


def test_cpu_time_of_all_and_of_those_that_run_a_module():
    busy, _ = run("while True: pass")
    idle, _ = run("import time; time.sleep(60)")
    before = cpu_seconds(os.getpid(), "tests.child")
    assert wait_until(lambda: max(cpu_seconds(os.getpid(), "tests.child")[1:]) > 0.5, 20)
    total_s, *own_s = cpu_seconds(os.getpid(), "tests.child")
    for child in (busy, idle):
        child.end(0)
    assert len(own_s) == 2 and own_s == sorted(own_s, reverse=busy.pid < idle.pid)
    assert total_s > before[0] and cpu_seconds(os.getpid())[1:] == []
