"""`octavo run-batch` over a core without a model."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.batch_process import run
from tests.process_fakes import wait_until
from tests.unit.serving.test_completion_route import answer_to


def line(number, **body):
    body = {"prompt": f"line {number}", "max_tokens": 4, "seed": 0, **body}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def results(path):
    return {result["custom_id"]: result for result in map(json.loads, path.read_text().splitlines())}


def test_every_request_has_its_result(files, capsys):
    source, target = files
    source.write_text("\n".join([line(0), line(1, max_tokens=-1), "", line(2)]))
    assert run({}, "-i", str(source), "-o", str(target)) == 1
    assert "2 requests answered, 1 failed, 0 were done before" in capsys.readouterr().err
    found = results(target)
    assert found.keys() == {"id-0", "id-1", "id-2"}
    for n in (0, 2):
        response = found[f"id-{n}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["choices"][0]["text"] == answer_to(f"line {n}", 4)[0]
    assert found["id-1"]["response"]["body"]["error"]["param"] == "max_tokens"


def test_a_url_that_is_not_there_fails_by_itself(files, capsys):
    source, target = files
    others = line(1).replace("completions", "translations"), line(2).replace("completions", "embeddings")
    source.write_text("\n".join([line(0), *others]))
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-log-len", "9"]
    assert run({}, "-i", str(source), "-o", str(target), *flags) == 1
    assert "1 requests answered, 2 failed" in capsys.readouterr().err
    found = results(target)
    assert found["id-0"]["response"]["status_code"] == 200
    error = found["id-1"]["response"]["body"]["error"]
    assert (error["code"], error["param"]) == (400, "url") and "/v1/embeddings" in error["message"]
    assert found["id-2"]["response"]["status_code"] == 404  # which this model does not have


def test_a_file_without_requests_is_done(files, capsys):
    source, target = files
    source.write_text("\n")
    assert run({}, str(source), str(target)) == 0
    assert target.read_text() == ""


def test_a_killed_run_goes_on(files, capsys):
    source, target = files
    source.write_text("\n".join(line(n, max_tokens=20, ignore_eos=True) for n in range(40)))
    orders = json.dumps({"step_s": 0.01})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.batch_process", orders, str(source), str(target)],
        stderr=subprocess.DEVNULL,
    )
    assert wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 5, 30)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = target.read_bytes()
    num_before = before.count(b"\n")
    assert num_before < 40
    whole = before[: before.rindex(b"\n") + 1]
    target.write_bytes(whole + b'{"id":"batch_req_12","custo')
    assert run({}, str(source), str(target)) == 0
    assert f"{40 - num_before} requests answered, 0 failed, {num_before} were done before" in (
        capsys.readouterr().err
    )
    assert target.read_bytes().startswith(whole)
    assert len(target.read_text().splitlines()) == 40
    assert results(target).keys() == {f"id-{n}" for n in range(40)}
    assert run({}, str(source), str(target)) == 0  # nothing left: no engine is started
    assert len(target.read_text().splitlines()) == 40


@pytest.mark.parametrize(
    ("content", "output", "text"),
    [
        (line(0) + "\n{", None, "line 2: This line is no request"),
        (line(0) + "\n" + line(0), None, "custom_id 'id-0'"),
        (line(0), "my notes", "holds no results"),
        (line(0), '{"id":"batch_req_1","custom_id":"id-7","response":null,"error":null}\n', "other requests"),
    ],
)
def test_files_that_cannot_be(files, capsys, content, output, text):
    source, target = files
    source.write_text(content)
    if output is not None:
        target.write_text(output)
    assert run({}, "-i", str(source), "-o", str(target)) == 2
    assert text in capsys.readouterr().err
    assert output is None or target.read_text() == output


def test_two_files_are_needed(files, capsys):
    source, _ = files
    assert run({}, "-i", str(source)) == 2
    assert run({}, str(source), "out") == 2
    assert "There is no file" in capsys.readouterr().err
    source.write_text(line(0))
    assert run({}, str(source), str(source)) == 2
