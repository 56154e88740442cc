"""/v1/files and /v1/batches over a core without a model; what comes out is computed by `answer_to`."""

import asyncio
import dataclasses
import json
import sqlite3
from functools import partial

import pytest
from starlette.requests import Request

from octavo.base.errors import ConfigError
from octavo.config.secret import Secret
from octavo.config.server import ServerConfig
from octavo.serving import form
from octavo.serving.middleware.keys import KeyCheck
from octavo.serving.openai import files
from octavo.serving.store.database import Store
from tests.serving import served
from tests.unit.serving.test_completion_route import answer_to

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def line(number, url=COMPLETIONS, **body):
    body = {"prompt": f"line {number}", "max_tokens": 4, "seed": 0, **body}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body})


async def upload(server, content, status=200, purpose="batch", **fields):
    answer = await server.client.post(
        "/v1/files", data={"purpose": purpose, **fields}, files={"file": ("in.jsonl", content)}
    )
    assert answer.status_code == status, answer.text
    return answer.json()


async def create(server, file_id, status=200, **fields):
    body = {
        "input_file_id": file_id,
        "endpoint": COMPLETIONS,
        "completion_window": "24h",
        **fields,
    }
    answer = await server.client.post("/v1/batches", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def get(server, path, status=200):
    answer = await server.client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


async def finished(server, batch, timeout_s=20):
    async with asyncio.timeout(timeout_s):
        while batch["status"] in ("validating", "in_progress", "cancelling"):
            await asyncio.sleep(0.01)
            batch = await get(server, f"/v1/batches/{batch['id']}")
    return batch


async def results(server, file_id):
    answer = await server.client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    return [json.loads(text) for text in answer.text.splitlines()]


async def run(server, lines, **fields):
    file = await upload(server, "\n".join(lines))
    return await finished(server, await create(server, file["id"], **fields))


async def test_files_come_back_as_they_went_in(server):
    content = b'{"a": 1}\r\n\n\xff\xfe\n last without an end'
    file = await upload(server, content)
    assert file["object"] == "file" and file["id"].startswith("file-")
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(content), "in.jsonl", "batch")
    assert await get(server, f"/v1/files/{file['id']}") == file
    assert (await server.client.get(f"/v1/files/{file['id']}/content")).content == content
    answer = await server.client.delete(f"/v1/files/{file['id']}")
    assert answer.json() == {"id": file["id"], "object": "file", "deleted": True}
    for path in ("", "/content"):
        await get(server, f"/v1/files/{file['id']}{path}", 404)
    assert (await server.client.delete(f"/v1/files/{file['id']}")).status_code == 404


async def test_an_output_grows_while_it_is_sent(server, monkeypatch):
    """A batch adds lines to its output meanwhile: what is sent is whole, whatever its size was before."""
    file = await upload(server, "first\n")
    store = server.app.state.store
    windows = store.windows

    async def after_one_more_line(document_id):
        await store.run(lambda transaction: transaction.write_line(document_id, 10, b"second\n"))
        async for lines in windows(document_id):
            yield lines

    monkeypatch.setattr(store, "windows", after_one_more_line)
    answer = await server.client.get(f"/v1/files/{file['id']}/content")
    assert answer.content == b"first\nsecond\n" and "content-length" not in answer.headers


async def test_lists_have_pages(server):
    ids = [(await upload(server, f"{n}"))["id"] for n in range(3)]
    page = await get(server, "/v1/files?limit=2")
    assert [file["id"] for file in page["data"]] == ids[:0:-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    rest = await get(server, f"/v1/files?after={page['last_id']}&limit=10000")
    assert rest["data"][0]["id"] == ids[0] and not rest["has_more"]
    oldest = (await get(server, "/v1/files?order=asc"))["data"]
    assert [file["id"] for file in oldest][-3:] == ids
    assert (await get(server, "/v1/files?purpose=other"))["data"] == []
    for query in ("limit=0", "limit=x", "limit=10001", "order=up"):
        await get(server, f"/v1/files?{query}", 400)
    await get(server, "/v1/files?after=file-none", 404)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"data": {"purpose": "fine-tune"}, "files": {"file": ("a", b"a")}}, "purpose"),
        ({"files": {"file": ("a", b"a")}}, "purpose"),
        ({"data": {"purpose": "batch", "file": "text"}, "files": {"x": ("a", b"a")}}, "x"),
        ({"data": {"purpose": "batch"}, "files": {"file": (None, b"a")}}, "file"),
        ({"data": {"purpose": "batch", "more": "1"}, "files": {"file": ("a", b"a")}}, "more"),
    ],
)
async def test_forms_that_are_refused(server, options, param):
    answer = await server.client.post("/v1/files", **options)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


async def test_bodies_that_are_no_form(server):
    assert (await server.client.post("/v1/files", json={"purpose": "batch"})).status_code == 415
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    for content in (b"--b\r\nnonsense", b"", b"--c--"):
        answer = await server.client.post("/v1/files", content=content, headers=headers)
        assert answer.status_code == 400, content
    answer = await server.client.post(
        "/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data"}
    )
    assert answer.status_code == 400


async def test_a_batch(server):
    lines = [line(n) for n in range(30)]
    lines[7] = line(7, max_tokens=-1)
    lines[9] = line(9, stream=True)
    lines.insert(3, "")
    batch = await run(server, lines, metadata={"a": "b"})
    assert batch["status"] == "completed" and batch["metadata"] == {"a": "b"}
    assert batch["request_counts"] == {"total": 30, "completed": 28, "failed": 2}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"] < batch["expires_at"]
    good = {result["custom_id"]: result for result in await results(server, batch["output_file_id"])}
    assert good.keys() == {f"id-{n}" for n in range(30)} - {"id-7", "id-9"}
    for n in (0, 29):
        result = good[f"id-{n}"]
        assert result["error"] is None and result["id"].startswith("batch_req_")
        assert result["response"]["status_code"] == 200 and result["response"]["request_id"]
        [choice] = result["response"]["body"]["choices"]
        assert choice["text"] == answer_to(f"line {n}", 4)[0]
    bad = await results(server, batch["error_file_id"])
    assert [(r["custom_id"], r["response"]["body"]["error"]["param"]) for r in bad] == [
        ("id-7", "max_tokens"),
        ("id-9", "stream"),
    ]
    assert all(r["response"]["status_code"] == 400 for r in bad)
    files = {file["id"]: file for file in (await get(server, "/v1/files?purpose=batch_output"))["data"]}
    assert {batch["output_file_id"], batch["error_file_id"]} <= files.keys()
    assert (await get(server, "/v1/batches?limit=1"))["data"] == [batch]


async def test_a_batch_of_conversations(server):
    messages = [{"role": "user", "content": "hi"}]
    text = json.dumps(
        {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": messages, "max_tokens": 5}}
    )
    batch = await run(server, [text], endpoint=CHAT)
    [result] = await results(server, batch["output_file_id"])
    assert result["response"]["body"]["object"] == "chat.completion"
    assert batch["error_file_id"] is None


async def test_files_that_are_no_batch(server):
    lines = [line(0), "{", line(1, url=CHAT), line(0), '{"custom_id": "x"}', line(2).replace("POST", "GET")]
    batch = await run(server, lines)
    assert batch["status"] == "failed" and batch["failed_at"]
    assert [(error["line"], error["code"]) for error in batch["errors"]["data"]] == [
        (2, "invalid_json_line"),
        (3, "invalid_url"),
        (4, "duplicate_custom_id"),
        (5, "invalid_json_line"),
        (6, "invalid_method"),
    ]
    assert batch["output_file_id"] is None
    assert (await run(server, ["", " "]))["errors"]["data"][0]["code"] == "empty_file"


async def test_batches_that_are_refused(server):
    file = await upload(server, line(0))
    await create(server, "file-none", 404)
    for fields in (
        {"endpoint": "/v1/responses"},
        {"completion_window": "1h"},
        {"metadata": {"a": 1}},
        {"metadata": {"a" * 65: "b"}},
        {"more": 1},
    ):
        await create(server, file["id"], 400, **fields)
    await get(server, "/v1/batches/batch_none", 404)
    assert (await server.client.post("/v1/batches/batch_none/cancel")).status_code == 404


async def test_a_batch_is_cancelled():
    async with served(step_s=0.01, max_num_seqs=4) as server:
        lines = [line(n, max_tokens=40, ignore_eos=True) for n in range(40)]
        batch = await create(server, (await upload(server, "\n".join(lines)))["id"])
        while not (await get(server, f"/v1/batches/{batch['id']}"))["request_counts"]["completed"]:
            await asyncio.sleep(0.01)
        assert (await server.client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 409
        load = server.engine.core.health()
        assert load.num_running + load.num_waiting <= 2  # half of the seats
        await server.client.post(f"/v1/batches/{batch['id']}/cancel")
        batch = await finished(server, batch)
        assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
        done = await results(server, batch["output_file_id"])
        assert 0 < len(done) == batch["request_counts"]["completed"] < 40
        again = await server.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.json() == batch
        assert (await server.client.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200


async def test_a_restart_goes_on_where_it_stopped(tmp_path):
    config = ServerConfig(store=str(tmp_path / "store"))
    lines = [line(n, max_tokens=20, ignore_eos=True) for n in range(30)]
    async with served(config, step_s=0.005, max_num_seqs=4) as server:
        batch = await create(server, (await upload(server, "\n".join(lines)))["id"])
        while (await get(server, f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] < 5:
            await asyncio.sleep(0.005)
    async with served(config) as server:
        batch = await get(server, f"/v1/batches/{batch['id']}")
        assert 5 <= batch["request_counts"]["completed"] < 30
        before = await results(server, batch["output_file_id"])
        batch = await finished(server, batch)
        assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        after = await results(server, batch["output_file_id"])
        assert sorted(result["custom_id"] for result in after) == sorted(f"id-{n}" for n in range(30))
        ids = {result["id"] for result in after}
        assert {result["id"] for result in before} <= ids  # none was done again
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o600


async def test_a_store_has_one_owner(tmp_path):
    config = ServerConfig(store=str(tmp_path / "store"))
    first, second, beside = Store(config), Store(config), Store(config)
    try:
        await first.open(as_owner=True)
        await beside.open()
        with pytest.raises(ConfigError, match="another server works"):
            await second.open(as_owner=True)
        await first.close()
        await second.open(as_owner=True)
    finally:
        for store in (first, second, beside):
            await store.close()
    (tmp_path / "text").write_text("no database " * 100)
    text = Store(ServerConfig(store=str(tmp_path / "text")))
    with pytest.raises(ConfigError, match="not a database"):
        await text.open()
    await text.close()


async def test_a_batch_expires(tmp_path):
    config = ServerConfig(store=str(tmp_path / "store"))
    lines = [line(n, max_tokens=100, ignore_eos=True) for n in range(6)]
    async with served(config, step_s=0.05, max_num_seqs=4) as server:
        batch = await create(server, (await upload(server, "\n".join(lines)))["id"])
        while not (await get(server, f"/v1/batches/{batch['id']}"))["in_progress_at"]:
            await asyncio.sleep(0.005)
    with sqlite3.connect(tmp_path / "store") as connection:
        connection.execute(
            "UPDATE document SET content = CAST(json_set(CAST(content AS TEXT), '$.expires_at', 1) AS BLOB) "
            "WHERE id = ?",
            (batch["id"],),
        )
    connection.close()
    async with served(config) as server:
        batch = await finished(server, batch)
        assert batch["status"] == "expired" and batch["expired_at"]
        errors = await results(server, batch["error_file_id"])
        assert {result["error"]["code"] for result in errors} == {"batch_expired"}
        assert batch["request_counts"] == {"total": 6, "completed": 0, "failed": 6}


async def test_the_store_is_bounded():
    async with served(ServerConfig(store_max_bytes=20_000)) as server:
        first = await upload(server, b"x" * 8000)
        second = await upload(server, b"y" * 8000)
        await upload(server, b"z" * 8000)
        await get(server, f"/v1/files/{first['id']}", 404)  # the oldest has gone
        await get(server, f"/v1/files/{second['id']}")
        assert (await upload(server, b"x" * 19_990, 507))["error"]["type"] == "InsufficientStorageError"
        await get(server, f"/v1/files/{second['id']}")  # for nothing nobody had to go
        await upload(server, b"x" * 100_000, 413)


async def test_a_full_store_ends_a_batch_and_not_the_server():
    lines = [line(n, max_tokens=60, ignore_eos=True) for n in range(60)]
    content = "\n".join(lines)
    async with served(ServerConfig(store_max_bytes=len(content) + 24_000)) as server:
        batch = await finished(server, await create(server, (await upload(server, content))["id"]))
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "InsufficientStorageError"
        assert 0 < batch["request_counts"]["completed"] < 60
        assert len(await results(server, batch["output_file_id"])) == batch["request_counts"]["completed"]


async def test_what_is_old_is_forgotten():
    async with served(ServerConfig(store_max_age=1.0)) as server:
        file = await upload(server, b"x")
        await get(server, f"/v1/files/{file['id']}")
        await asyncio.sleep(1.1)
        await get(server, f"/v1/files/{file['id']}", 404)


async def test_tenants_see_their_own(server):
    keys = [Secret.of("one"), Secret.of("two")]
    config = dataclasses.replace(server.app.state.config, api_key=keys)
    app = KeyCheck(server.app, config.api_key, ())

    async def with_state(scope, receive, send):
        scope.setdefault("state", {})
        await app(scope, receive, send)

    transport = type(server.client._transport)(with_state)
    client = partial(type(server.client), transport=transport, base_url="http://octavo")
    async with (
        client(headers={"Authorization": "Bearer one"}) as one,
        client(headers={"Authorization": "Bearer two"}) as two,
    ):
        answer = await one.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", line(0))})
        path = f"/v1/files/{answer.json()['id']}"
        assert (await one.get(path)).status_code == 200
        assert (await two.get(path)).status_code == (await two.get(path + "/content")).status_code == 404
        assert (await two.delete(path)).status_code == 404
        assert (await two.get("/v1/files")).json()["data"] == []


async def test_unfinished_uploads_take_what_has_arrived_of_them(monkeypatch):
    """Stalled ones, however many, keep nobody from uploading; large ones do, but not others."""
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 200_000)
    monkeypatch.setattr(form, "_IN_MEMORY_BYTES", 100_000)
    async with served() as server:
        uploads, bodies = server.app.state.uploads, server.app.state.bodies
        begun = [asyncio.Event() for _ in range(12)]
        go_on = asyncio.Event()
        stalled = [asyncio.create_task(slow_upload(server, e, go_on)) for e in begun[:8]]
        await asyncio.gather(*(event.wait() for event in begun[:8]))
        await upload(server, "x" * 1000)
        assert uploads.num_bytes == bodies.num_bytes == 0
        large = [asyncio.create_task(slow_upload(server, e, go_on, 190_000)) for e in begun[8:11]]
        await asyncio.gather(*(event.wait() for event in begun[8:11]))
        assert 0 < bodies.num_bytes <= 3 * 100_000 and uploads.num_bytes > 300_000
        refused = await upload(server, "x" * 190_000, 503)
        assert "400000 of one sender" in refused["error"]["message"]
        another = Request({"type": "http", "state": {"tenant": "another"}})
        with uploads.open(another) as grow_to:
            grow_to(190_000)
        go_on.set()
        answers = await asyncio.gather(*stalled, *large)
        assert [answer.status_code for answer in answers] == [200] * 11
        assert uploads.num_bytes == bodies.num_bytes == 0


async def slow_upload(server, begun, go_on, size=100):
    async def content():
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * size
        begun.set()
        await go_on.wait()
        yield b"\r\n--b--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    return await server.client.post("/v1/files", content=content(), headers=headers)
