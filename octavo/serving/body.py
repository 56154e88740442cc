"""Bodies of requests: bounded, strict JSON, then a struct of the protocol; no field goes unchecked.

Strict means: UTF-8, no NaN or Infinity, no booleans or strings for numbers, and only fields that are known
(ServerConfig.strict). Raises HTTPError and RequestError, which name the field.
"""

import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.base.errors import OctavoError, RequestError
from octavo.base.foreign import FIELDS
from octavo.base.log import get_logger
from octavo.serving.errors import ClientGone, HTTPError

logger = get_logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)
_PLACE = re.compile(r" - at `\$\.?([^`\[.]*)[^`]*`$")
_SHOWN_NAMES = 5


async def read_body(request: Request, model: type[T], *, takes_place: bool = False) -> T:
    """The body of a request as `model`.

    takes_place: the request is for the engine, and is refused unread while that has no room.
    Raises Overloaded and EngineDead then.
    """
    if takes_place:
        await _refuse_when_full(request)
    _check_media_type(request)
    content = await _read(request, request.app.state.config.max_request_bytes)
    return parse_body(content, model, strict=request.app.state.config.strict)


def parse_body(content: bytes | str, model: type[T], *, strict: bool) -> T:
    """JSON text as `model`; strict: unknown fields are errors."""
    try:
        fields = msgspec.json.decode(content)
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.") from None
    except UnicodeError:
        raise RequestError("The body is not UTF-8.") from None
    except msgspec.MsgspecError as error:
        raise RequestError(f"The body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError("The body must be a JSON object.")
    return _convert(fields, model, strict=strict)


def _convert(fields: dict[str, Any], model: type[T], *, strict: bool) -> T:
    known = model.__struct_fields__
    for name in FIELDS.keys() & fields.keys():
        if FIELDS[name].is_refused and FIELDS[name].asks(fields[name]):
            raise RequestError(f"{name} is not supported: {FIELDS[name].text}.", name)
    _judge([name for name in fields if name not in known and name not in FIELDS], strict=strict)
    try:
        return msgspec.convert(fields, model, strict=True)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, RequestError):
            raise cause from None
        raise _explained(error) from None


def _judge(unknown: list[str], *, strict: bool) -> None:
    if not unknown:
        return
    names = ", ".join(repr(name[:100]) for name in unknown[:_SHOWN_NAMES])
    if strict:
        raise RequestError(
            f"Unknown field {names}: nothing of octavo goes by that name. Leave it out, or start the server "
            "with --no-strict to have unknown fields ignored.",
            unknown[0],
        )
    logger.warning("Unknown field %s is ignored.", names)


def _explained(error: msgspec.ValidationError) -> RequestError:
    """msgspec says what it expected and where; the field's name is told apart."""
    text = str(error)
    place = _PLACE.search(text)
    if place is None:
        missing = re.search(r"missing required field `([^`]*)`", text)
        return RequestError(f"{text}.", missing[1] if missing else None)
    where = text[place.start() + len(" - at `$") : -1].lstrip(".")
    return RequestError(f"{where}: {text[: place.start()]}.", place[1] or None)


async def _refuse_when_full(request: Request) -> None:
    """Before any work is done for it: many may come when there is no room."""
    try:
        request.app.state.engines.of().check_admission()
    except OctavoError:
        if request.headers.get("connection", "").lower() == "close":
            await _read(request, request.app.state.config.max_request_bytes)  # else closing resets it
        raise


def _check_media_type(request: Request) -> None:
    """Only JSON: what a form on another site can send is refused."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not re.fullmatch(r"application/[\w.-]+\+json", media_type):
        raise HTTPError(415, "The body must be JSON: send Content-Type: application/json.", "Content-Type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPError(415, "Compressed bodies are not read: send it as it is.", "Content-Encoding")


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def _too_large(limit: int) -> HTTPError:
    return HTTPError(413, f"The body is larger than {limit} bytes, the server's max_request_bytes.")
