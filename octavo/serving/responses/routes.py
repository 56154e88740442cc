"""/v1/responses: OpenAI's newer protocol, with conversations that the server remembers."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from octavo.base.errors import RequestError, wrong
from octavo.serving.body import read_body
from octavo.serving.caller import Caller
from octavo.serving.errors import HTTPError
from octavo.serving.openai.answers import json_response
from octavo.serving.openai.files import Deleted
from octavo.serving.openai.pagination import Page, PageQuery, in_store
from octavo.serving.openai.turn import TURN, prepare_turn
from octavo.serving.registry import Route
from octavo.serving.responses import record
from octavo.serving.responses.answers import Response, Status
from octavo.serving.responses.background import EventLog
from octavo.serving.responses.conversation import chat_request, input_items
from octavo.serving.responses.protocol import CreateResponse, Item
from octavo.serving.responses.record import StoredResponse
from octavo.serving.responses.response_answer import ResponseAnswer
from octavo.serving.responses.work import ResponseWork, told_cancelled
from octavo.serving.store.transaction import Transaction
from octavo.serving.streaming import EventStream, leaving, unless_gone

_TOLD = set(Response.__struct_fields__) & set(CreateResponse.__struct_fields__)
"""Fields of a request that its response repeats."""


async def create_response(request: Request) -> HTTPResponse:
    """The model's turn, whole, as a stream of events, or later."""
    caller = Caller.of(request)
    body = await read_body(request, CreateResponse)
    if body.background and body.store is False:
        raise RequestError("A response in the background is found in the store: leave store out.", "store")
    history = await _history(request, body.previous_response_id)
    stored = StoredResponse(_response(caller, body), history, input_items(body))
    asked = chat_request(body, history + stored.input)
    answer = ResponseAnswer(stored.response)
    worker = replace(caller, in_bulk=bool(body.background))
    work = ResponseWork(worker, request.app.state.store, asked, stored, answer)
    if body.background:
        asked.request_id = stored.response.id
        log = EventLog() if body.stream else None
        await _start(request, work, log)
        if log is None:
            return json_response(stored.response)
        return EventStream(log.follow(-1), caller.config)
    if body.stream:
        return EventStream(work.events(), caller.config)
    return json_response(await unless_gone(leaving(request.receive), work.finish()))


async def show_response(request: Request) -> HTTPResponse:
    """A response that was stored; one in the background, as far as it is, or its stream once more."""
    stored = await in_store(request, record.find)
    if request.query_params.get("stream", "false") in ("false", "0"):
        return json_response(stored.response)
    if (log := request.app.state.background.log(stored.response.id)) is None:
        raise RequestError(
            "There is no stream of this response: it was not asked for with background and stream, or ended "
            "long ago, or with its server. Leave stream out.",
            "stream",
        )
    return EventStream(log.follow(_starting_after(request)), Caller.of(request).config)


async def list_input_items(request: Request) -> HTTPResponse:
    """What was asked, the latest first."""
    query = PageQuery.of(request, 20, 100)
    items = (await in_store(request, record.find)).input
    if query.newest_first:
        items = items[::-1]
    if query.after:
        places = [place for place, item in enumerate(items) if item["id"] == query.after]
        if not places:
            raise HTTPError(404, f"There is no item {query.after[:100]!r}.", "after")
        items = items[places[0] + 1 :]
    return query.response(items[: query.limit + 1], lambda item: str(item["id"]))


async def cancel_response(request: Request) -> HTTPResponse:
    """End a response in the background."""

    def cancel(transaction: Transaction, tenant: str, response_id: str) -> Response:
        if not record.find(transaction, tenant, response_id).response.background:
            raise RequestError("Only a response in the background can be cancelled.", "response_id")
        return record.cancel(transaction, tenant, response_id)

    response = await in_store(request, cancel)
    await _end(request, response.id, partial(told_cancelled, response))
    return json_response(response)


async def delete_response(request: Request) -> HTTPResponse:
    """Forget a response; one in the background ends."""

    def delete(transaction: Transaction, tenant: str, response_id: str) -> Deleted:
        record.find(transaction, tenant, response_id)
        transaction.remove(response_id)
        return Deleted(response_id, "response")

    deleted = await in_store(request, delete)
    await _end(request, deleted.id)
    return json_response(deleted)


def _response(caller: Caller, body: CreateResponse) -> Response:
    told = {name: value for name in _TOLD if (value := getattr(body, name)) is not None}
    told["model"] = caller.asking(body.model).model
    status: Status = "queued" if body.background else "in_progress"
    return Response(id=f"resp_{uuid4().hex}", created_at=int(time.time()), status=status, output=[], **told)


async def _history(request: Request, previous_id: str | None) -> list[Item]:
    if previous_id is None:
        return []
    name = "previous_response_id"
    try:
        previous = await in_store(request, record.find, response_id=previous_id)
    except HTTPError as error:
        raise HTTPError(error.status, str(error), name) from None
    if previous.response.status in ("queued", "in_progress"):
        raise RequestError(f"{previous_id[:100]!r} is not done yet.", name)
    return previous.conversation()


def _starting_after(request: Request) -> int:
    given = request.query_params.get("starting_after", "-1")
    try:
        return max(-1, int(given))
    except ValueError:
        raise wrong("starting_after", "must be the number of an event") from None


async def _start(request: Request, work: ResponseWork, log: EventLog | None) -> None:
    """Begin in the background what can be done. Raises RequestError, Overloaded, HTTPError 507."""
    prepare_turn(work.caller, work.asked, [work.asked.messages])
    work.caller.asking(work.asked.model).engine.check_admission()
    request.app.state.background.check()
    await work.add()
    request.app.state.background.start(work.stored.response.id, work.go_on(log), log)


async def _end(request: Request, response_id: str, last: Callable[[int], bytes] | None = None) -> None:
    """Stop the work on one, which may be that of another API process of this engine."""
    request.app.state.background.cancel(response_id, last)
    caller = Caller.of(request)
    for engine in caller.engines.loaded():
        await engine.abort(f"{TURN}-{response_id}", caller.tenant)


_ONE = "/v1/responses/{response_id}"
ROUTES = [
    Route("/v1/responses", create_response, CreateResponse, Response, streams=True),
    Route(_ONE, show_response, response_model=Response),
    Route(_ONE, delete_response, response_model=Deleted, methods=("DELETE",)),
    Route(f"{_ONE}/input_items", list_input_items, response_model=Page),
    Route(f"{_ONE}/cancel", cancel_response, response_model=Response, methods=("POST",)),
]
