"""/v1/batches: many requests in a file, worked off beside those that come one by one; see `batch_runner`."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.openai import batch_record
from octavo.serving.openai.answers import json_response
from octavo.serving.openai.batch_lines import check_endpoint
from octavo.serving.openai.batch_record import Batch, CreateBatch
from octavo.serving.openai.pagination import Page, PageQuery
from octavo.serving.registry import Route


async def create_batch(request: Request) -> Response:
    """Work off a file of requests within 24 hours."""
    asked = await read_body(request, CreateBatch)
    check_endpoint(asked.endpoint)
    tenant, state = Caller.of(request).tenant, request.app.state
    batch = await state.store.run(partial(batch_record.create, tenant=tenant, asked=asked))
    state.batch_runner.notice()
    return json_response(batch)


async def list_batches(request: Request) -> Response:
    """Batches, the newest first."""
    query, tenant = PageQuery.of(request, 20, 100), Caller.of(request).tenant
    documents = await request.app.state.store.run(
        lambda transaction: transaction.page(
            "batch", tenant, after=query.after, limit=query.limit + 1, newest_first=query.newest_first
        )
    )
    return query.response(documents, batch_record.read, lambda document: document.id)


async def show_batch(request: Request) -> Response:
    """How far a batch is."""
    batch_id, tenant = request.path_params["batch_id"], Caller.of(request).tenant
    find = partial(batch_record.find, tenant=tenant, batch_id=batch_id)
    return json_response(await request.app.state.store.run(find))


async def cancel_batch(request: Request) -> Response:
    """End a batch; the answers that it has are kept."""
    batch_id, tenant, state = request.path_params["batch_id"], Caller.of(request).tenant, request.app.state
    batch = await state.store.run(partial(batch_record.cancel, tenant=tenant, batch_id=batch_id))
    state.batch_runner.notice()
    return json_response(batch)


ROUTES = [
    Route("/v1/batches", create_batch, CreateBatch, Batch),
    Route("/v1/batches", list_batches, response_model=Page),
    Route("/v1/batches/{batch_id}", show_batch, response_model=Batch),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, response_model=Batch, methods=("POST",)),
]
