"""/v1/batches: many requests in a file, worked off beside those that come one by one; see `batch_runner`."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.serving.body import read_body
from octavo.serving.openai import batch_record
from octavo.serving.openai.answers import json_response
from octavo.serving.openai.batch_lines import check_endpoint
from octavo.serving.openai.batch_record import Batch, CreateBatch
from octavo.serving.openai.pagination import Page, PageQuery, in_store
from octavo.serving.registry import Route


async def create_batch(request: Request) -> Response:
    """Work off a file of requests within 24 hours."""
    asked = await read_body(request, CreateBatch)
    check_endpoint(asked.endpoint)
    batch = await in_store(request, batch_record.create, asked=asked)
    request.app.state.batch_runner.notice()
    return json_response(batch)


async def list_batches(request: Request) -> Response:
    """Batches, the newest first."""
    query = PageQuery.of(request, 20, 100)
    batches = map(batch_record.read, await query.documents(request, "batch"))
    return query.response(list(batches), lambda batch: batch.id)


async def show_batch(request: Request) -> Response:
    """How far a batch is."""
    return json_response(await in_store(request, batch_record.find))


async def cancel_batch(request: Request) -> Response:
    """End a batch; the answers that it has are kept."""
    batch = await in_store(request, batch_record.cancel)
    request.app.state.batch_runner.notice()
    return json_response(batch)


ROUTES = [
    Route("/v1/batches", create_batch, CreateBatch, Batch),
    Route("/v1/batches", list_batches, response_model=Page),
    Route("/v1/batches/{batch_id}", show_batch, response_model=Batch),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, response_model=Batch, methods=("POST",)),
]
