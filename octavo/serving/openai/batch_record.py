"""`Batch`: a batch as clients see it and as the store keeps it, and how it changes, in one transaction each.

Used by the routes of `batches` and by `batch_runner`. While a batch is open, it, its input and its outputs
are held in the store; a line is in the output exactly when it counts as done.
"""

import time
from functools import partial
from typing import Annotated, Literal, get_args
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from octavo.base.errors import Overloaded
from octavo.serving.openai.answers import encode
from octavo.serving.openai.batch_lines import LineResult
from octavo.serving.openai.files import FileObject
from octavo.serving.store.transaction import Document, Transaction

MAX_OPEN = 100
"""Batches that are not done, of all tenants."""
_WINDOW_S = 24 * 3600
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
End = Literal["failed", "completed", "expired", "cancelled"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class CreateBatch(Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class RequestCounts(Struct):
    """Lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct):
    """What is wrong with the input file."""

    code: str
    message: str
    line: int | None = None
    """From 1 on."""
    param: str | None = None


class BatchErrors(Struct):
    """Why the batch failed."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class Batch(Struct, kw_only=True):
    """One batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    """Answers so far; there from the first on."""
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: Metadata | None = None


def create(transaction: Transaction, tenant: str, asked: CreateBatch) -> Batch:
    """A new batch, to be validated. Raises HTTPError 404 without the file, Overloaded."""
    if len(transaction.held("batch")) >= MAX_OPEN:
        raise Overloaded(f"{MAX_OPEN} batches are open; try again when one is done.", retry_after_s=60)
    transaction.find("file", asked.input_file_id, tenant)
    now_s = _now_s()
    batch = Batch(
        id=f"batch_{uuid4().hex}",
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        created_at=now_s,
        expires_at=now_s + _WINDOW_S,
        request_counts=RequestCounts(),
        metadata=asked.metadata,
    )
    transaction.add("batch", batch.id, tenant, encode(batch), is_held=True)
    transaction.hold(batch.input_file_id)
    return batch


def find(transaction: Transaction, tenant: str, batch_id: str) -> Batch:
    """Raises HTTPError 404."""
    return read(transaction.find("batch", batch_id, tenant))


def read(document: Document) -> Batch:
    """The batch in a document."""
    return msgspec.json.decode(document.content, type=Batch)


def open_batches(transaction: Transaction) -> list[tuple[str, Batch]]:
    """All that are not done, the oldest first, with their tenants."""
    return [(document.tenant, read(document)) for document in transaction.held("batch")]


def begin(transaction: Transaction, tenant: str, batch_id: str, total: int) -> Batch:
    """Its lines are in order."""
    batch = find(transaction, tenant, batch_id)
    batch.request_counts.total = total
    if batch.status == "validating":
        batch.status, batch.in_progress_at = "in_progress", _now_s()
    return _keep(transaction, batch)


def cancel(transaction: Transaction, tenant: str, batch_id: str) -> Batch:
    """Ask for its end; one that is done stays as it is."""
    batch = find(transaction, tenant, batch_id)
    if batch.status in ("validating", "in_progress"):
        batch.status, batch.cancelling_at = "cancelling", _now_s()
    return _keep(transaction, batch)


def add_result(transaction: Transaction, tenant: str, batch_id: str, number: int, result: LineResult) -> None:
    """Line `number` of its input is done. Raises HTTPError 507 when the store is full."""
    batch = find(transaction, tenant, batch_id)
    new_file = partial(_new_file, transaction, tenant, batch_id)
    if result.is_good:
        file_id = batch.output_file_id = batch.output_file_id or new_file("output")
        batch.request_counts.completed += 1
    else:
        file_id = batch.error_file_id = batch.error_file_id or new_file("error")
        batch.request_counts.failed += 1
    transaction.write_line(file_id, number, encode(result) + b"\n")
    _keep(transaction, batch)


def done_lines(transaction: Transaction, batch: Batch) -> set[int]:
    """Numbers of the lines that have their result."""
    files = filter(None, (batch.output_file_id, batch.error_file_id))
    return set().union(*map(transaction.line_numbers, files))


def end(
    transaction: Transaction, tenant: str, batch_id: str, status: End, errors: list[BatchError] | None = None
) -> Batch:
    """Nothing more is done for it."""
    batch = find(transaction, tenant, batch_id)
    if batch.status in get_args(End):
        return batch
    batch.status = status
    batch.errors = BatchErrors(errors) if errors else None
    now_s = _now_s()
    setattr(batch, f"{status}_at", now_s)
    if status == "completed":
        batch.finalizing_at = now_s
    _keep(transaction, batch)
    for held in filter(None, (batch.id, batch.input_file_id, batch.output_file_id, batch.error_file_id)):
        transaction.release(held)
    return batch


def _new_file(transaction: Transaction, tenant: str, batch_id: str, what: str) -> str:
    file_id = f"file-{uuid4().hex}"
    note = FileObject(created_at=_now_s(), filename=f"{batch_id}_{what}.jsonl", purpose="batch_output")
    transaction.add("file", file_id, tenant, encode(note), is_held=True)
    return file_id


def _keep(transaction: Transaction, batch: Batch) -> Batch:
    transaction.replace(batch.id, encode(batch))
    return batch


def _now_s() -> int:
    return int(time.time())
