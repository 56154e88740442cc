"""`open_form` reads a form with a file (multipart/form-data) within the server's budgets."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartParser
from starlette.requests import Request
from starlette.types import Message

from octavo.serving.errors import HTTPError

_MAX_FORM_BYTES = 2**16
"""Of a form besides its file."""
_IN_MEMORY_BYTES = MultiPartParser.spool_max_size
"""What a file has on its way in before it lies on the disk."""


@asynccontextmanager
async def open_form(request: Request, limit: int, max_fields: int) -> AsyncIterator[FormData]:
    """The form of a request; it fails as soon as it takes more memory or disk than it may."""
    state = request.app.state
    with state.bodies.open(request) as in_memory, state.uploads.open(request) as on_disk:

        def grow_to(num_bytes: int) -> None:
            in_memory(min(num_bytes, _IN_MEMORY_BYTES))
            on_disk(num_bytes)

        bounded = _bounded(request, limit, grow_to)
        async with bounded.form(max_files=1, max_fields=max_fields, max_part_size=_MAX_FORM_BYTES) as form:
            yield form


def _bounded(request: Request, limit: int, grow_to: Callable[[int], None]) -> Request:
    """The request, whose body fails with 413 as soon as it is too large.

    grow_to: told how much of it is here; it may raise too
    """
    limit += _MAX_FORM_BYTES
    too_large = HTTPError(413, f"A file may have {limit - _MAX_FORM_BYTES} bytes here.", "file")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise HTTPError(415, "A file is sent as a form: Content-Type: multipart/form-data.", "Content-Type")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    num_bytes = 0

    async def receive() -> Message:
        nonlocal num_bytes
        message = await request.receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise too_large
        grow_to(num_bytes)
        return message

    return Request(request.scope, receive)
