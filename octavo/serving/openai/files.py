"""/v1/files: the inputs and the outputs of batches, kept in the store line by line."""

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import IO, Literal
from uuid import uuid4

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from octavo.base.errors import RequestError
from octavo.serving.body_budget import BodyBudget
from octavo.serving.caller import Caller
from octavo.serving.errors import ClientGone, HTTPError
from octavo.serving.form import open_form
from octavo.serving.openai.answers import encode, json_response
from octavo.serving.openai.pagination import Page, PageQuery, in_store
from octavo.serving.registry import Route
from octavo.serving.store.database import Store
from octavo.serving.store.transaction import Document, Transaction

MAX_FILE_BYTES = 200 * 2**20
MAX_LINES = 50_000
_PURPOSE: Literal["batch"] = "batch"


class FileObject(msgspec.Struct, kw_only=True):
    """One file; its content is asked for by itself. Its id and its size are the store's."""

    id: str = ""
    bytes: int = 0
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class Deleted(msgspec.Struct):
    """What was there."""

    id: str
    object: str
    deleted: bool = True


async def create_file(request: Request) -> Response:
    """Keep a file, sent as a form with the fields `file` and `purpose` = batch."""
    store: Store = request.app.state.store
    caller = Caller.of(request)
    try:
        async with open_form(request, min(MAX_FILE_BYTES, store.max_bytes), max_fields=8) as form:
            upload = _upload_of(form)
            note = FileObject(
                created_at=int(time.time()), filename=str(upload.filename)[:256], purpose=_PURPOSE
            )
            keep = partial(_keep, note, caller.tenant, upload.file, caller.config.max_request_bytes)
            document = await store.run(keep)
    except ClientDisconnect:
        raise ClientGone from None
    return json_response(shown(document))


def upload_budget() -> BodyBudget:
    """Of files on their way to the store: four of the largest, of which one sender may bring two."""
    return BodyBudget(4 * MAX_FILE_BYTES, "four files of the largest size", 2 * MAX_FILE_BYTES)


async def list_files(request: Request) -> Response:
    """Files of one purpose, or all, the newest first."""
    query, purpose = PageQuery.of(request, 10_000, 10_000), request.query_params.get("purpose")
    documents = await query.documents(
        request, "file", lambda document: purpose in (None, shown(document).purpose)
    )
    return query.response([shown(document) for document in documents], lambda file: file.id)


async def show_file(request: Request) -> Response:
    """One file."""
    return json_response(shown(await in_store(request, _find)))


async def show_content(request: Request) -> Response:
    """The bytes of a file.

    Without a Content-Length: a batch may add lines to its output while they are sent.
    """
    document = await in_store(request, _find)
    content = _content(request.app.state.store, document.id)
    return StreamingResponse(content, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Forget a file that no batch needs."""

    def delete(transaction: Transaction, tenant: str, file_id: str) -> Deleted:
        if _find(transaction, tenant, file_id).num_holders:
            raise HTTPError(409, f"{file_id} is in use: cancel its batch first.", "file_id")
        transaction.remove(file_id)
        return Deleted(file_id, "file")

    return json_response(await in_store(request, delete))


def shown(document: Document) -> FileObject:
    """What is told of a file."""
    file = msgspec.json.decode(document.content, type=FileObject)
    file.id, file.bytes = document.id, document.num_bytes - len(document.content)
    return file


def _upload_of(form: FormData) -> UploadFile:
    if unknown := sorted(set(form) - {"file", "purpose"}):
        raise RequestError(
            f"Unknown field {unknown[0][:100]!r} of the form: file and purpose are known; how long files are "
            "kept is the operator's choice (--store-max-age).",
            unknown[0],
        )
    if form.get("purpose") != _PURPOSE:
        raise RequestError('purpose must be "batch": files are for batches here.', "purpose")
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise RequestError("The form needs a field file with a file name.", "file")
    return upload


def _keep(
    note: FileObject, tenant: str, content: IO[bytes], max_line: int, transaction: Transaction
) -> Document:
    """Write down every line, its end included."""
    file_id = f"file-{uuid4().hex}"
    transaction.add("file", file_id, tenant, encode(note), is_held=True)
    for number, line in enumerate(iter(partial(content.readline, max_line + 1), b"")):
        if number == MAX_LINES:
            raise RequestError(f"A file for batches may have {MAX_LINES} lines.", "file")
        if len(line) > max_line:
            raise RequestError(
                f"Line {number + 1} has more than {max_line} bytes, as no request may.", "file"
            )
        transaction.write_line(file_id, number, line)
    transaction.release(file_id)
    return transaction.find("file", file_id, tenant)


def _find(transaction: Transaction, tenant: str, file_id: str) -> Document:
    return transaction.find("file", file_id, tenant)


async def _content(store: Store, file_id: str) -> AsyncIterator[bytes]:
    async for lines in store.windows(file_id):
        yield b"".join(content for _, content in lines)


ROUTES = [
    Route("/v1/files", create_file, response_model=FileObject, methods=("POST",)),
    Route("/v1/files", list_files, response_model=Page),
    Route("/v1/files/{file_id}", show_file, response_model=FileObject),
    Route("/v1/files/{file_id}/content", show_content),
    Route("/v1/files/{file_id}", delete_file, response_model=Deleted, methods=("DELETE",)),
]
