"""Batches by the real `openai` client: through a killed server, and over several front processes."""

import json
import signal

import openai
import psutil
import pytest

from tests.process_fakes import wait_until
from tests.served_process import ServeProcess

NUM_LINES = 24
LINES = [
    json.dumps(
        {
            "custom_id": f"id-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"line {n}", "max_tokens": 10, "ignore_eos": True},
        }
    )
    for n in range(NUM_LINES)
]


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def start(client):
    file = client.files.create(file=("in.jsonl", "\n".join(LINES).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
    )


def results(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def is_done(client, batch):
    return client.batches.retrieve(batch.id).status == "completed"


def kill(server):
    for process in [*server.children(), psutil.Process(server.process.pid)]:
        process.kill()
    server.process.wait()


def test_a_killed_server(tmp_path):
    flags = ("--store", str(tmp_path / "store"))
    with ServeProcess(*flags, orders={"step_s": 0.01}) as server, client_of(server) as client:
        batch = start(client)
        assert wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5, 20)
        output_id = client.batches.retrieve(batch.id).output_file_id
        before = results(client, output_id)
        kill(server)
    with ServeProcess(*flags) as server, client_of(server) as client:
        assert wait_until(lambda: is_done(client, batch), 20)
        done = client.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (NUM_LINES, 0)
        assert done.metadata == {"who": "me"} and done.output_file_id == output_id
        after = results(client, output_id)
        assert sorted(r["custom_id"] for r in after) == sorted(f"id-{n}" for n in range(NUM_LINES))
        assert all(result in after for result in before)  # done once, and kept
        assert [b.id for b in client.batches.list()] == [batch.id]
        assert {f.purpose for f in client.files.list()} == {"batch", "batch_output"}
        client.files.delete(output_id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(output_id)
        server.signal(signal.SIGTERM)
        assert server.end() == 0


@pytest.mark.slow
def test_several_fronts_share_what_is_kept():
    with ServeProcess("--api-server-count", "2", orders={"step_s": 0.001}) as server:
        batches = []
        for _ in range(6):  # a connection each, so that both processes are asked
            with client_of(server) as client:
                batches.append(start(client))
        for batch in batches:
            with client_of(server) as client:
                assert wait_until(lambda: is_done(client, batch), 30)  # noqa: B023
        server.signal(signal.SIGTERM)
        assert server.end() == 0
