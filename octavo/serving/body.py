"""Bodies of requests: bounded, strict JSON, then a struct of the protocol; no field goes unchecked.

Large ones are parsed on a thread. One call of the JSON library holds up every thread, and takes the longer
the more objects, keys and values there are: these are counted first.

Strict means: UTF-8, no NaN or Infinity, no booleans for numbers, no texts for them but their digits, and only
fields that are known (ServerConfig.strict). Raises HTTPError and RequestError, which name the field.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.base.errors import OctavoError, RequestError, wrong
from octavo.base.foreign import FIELDS
from octavo.base.log import get_logger
from octavo.frontend.admission.preparation import Preparation
from octavo.serving.adapters import Scales
from octavo.serving.caller import Caller
from octavo.serving.errors import ClientGone, HTTPError
from octavo.serving.foreign_fields import translated
from octavo.serving.number_texts import with_numbers
from octavo.serving.streaming import leaving, unless_gone

logger = get_logger(__name__)
C = TypeVar("C", bytes, str)
T = TypeVar("T", bound=msgspec.Struct)
_PLACE = re.compile(r" - at `\$\.?([^`\[.]*)[^`]*`$")
_SHOWN_NAMES = 5
_SMALL_BYTES = 2**16
"""Bodies up to that are parsed on the event loop."""
_parsing = Preparation(num_threads=2)
_MAX_PARTS, _MAX_VALUES = 2**16, 2**20
"""Keys, objects and lists of a body; values in its lists and objects. Some 50 ms of parsing each."""
_PARTS = (b":", b"[", b"{")
_FEW_TEXTS = 500
_PIECES = re.compile(rb'"[^"]*"?|[^"]+')
"""Texts, and what is between them, where no quote is escaped."""


async def read_body(
    request: Request, model: type[T], *, takes_place: bool = False, any_type: bool = False
) -> T:
    """The body of a request as `model`.

    takes_place: the request is for the engine, and is refused unread while that has no room.
    Raises Overloaded and EngineDead then.
    any_type: programs need not say that it is JSON; pages must
    """
    parse = partial(parse_body, model=model, strict=request.app.state.config.strict)
    return await read_parsed(request, parse, takes_place=takes_place, any_type=any_type)


async def read_parsed(
    request: Request, parse: Callable[[bytes], T], *, takes_place: bool = False, any_type: bool = False
) -> T:
    """What `parse` makes of the body of a request; otherwise as `read_body`."""
    if takes_place:
        await _refuse_when_full(request)
    _check_media_type(request, any_type=any_type)
    state = request.app.state
    with state.bodies.open(request) as grow_to:
        body = await parse_aside(await _read(request, state.config.max_request_bytes, grow_to), parse)
    if hasattr(body, "model") and getattr(body, "needs_model", True):
        await borrow(request, body.model, getattr(body, "lora", None))
    return body


async def borrow(request: Request, model: str | None, lora: Scales = None) -> None:
    """Have the model there until the answer has been sent; a request that names none may in its query.

    lora: adapters of it. Raises UnknownModel, Overloaded, HTTPError, RequestError.
    """
    caller = Caller.of(request)
    waiting = caller.engines.borrow(model or caller.model, lora)
    if caller.engines.only() is None:
        waiting = unless_gone(leaving(request.receive), waiting)
    request.state.borrowed.enter_context(await waiting)


async def parse_aside(content: C, parse: Callable[[C], T]) -> T:
    """What `parse` makes of the content, on a thread if that is large; it calls `decode` or `parse_body`."""
    if len(content) <= _SMALL_BYTES:
        return parse(content)
    return await _parsing.run(partial(parse, content))


def parse_body(content: bytes | str, model: type[T], *, strict: bool) -> T:
    """JSON text as `model`; strict: unknown fields are errors."""
    return convert(decode(content), model, strict=strict)


def decode(content: bytes | str) -> dict[str, Any]:
    """JSON text as the object that it must be."""
    if len(content) > _SMALL_BYTES:
        _check_parts(content if isinstance(content, bytes) else content.encode(errors="replace"))
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
    return fields


def _check_parts(content: bytes) -> None:
    """Refuse a body whose many parts would take long to become objects."""
    outside = _outside(content)
    if outside.count(b",") <= _MAX_VALUES and sum(map(outside.count, _PARTS)) <= _MAX_PARTS:
        return
    num_parts = num_values = 0
    without_escapes = content.replace(rb"\\", b"").replace(rb"\"", b"")
    for piece in _PIECES.finditer(without_escapes):
        if (between := piece[0])[0] != ord('"'):
            num_values += between.count(b",")
            num_parts += sum(map(between.count, _PARTS))
        if num_parts > _MAX_PARTS or num_values > _MAX_VALUES:
            raise RequestError(
                f"The body has more than {_MAX_PARTS} keys, objects and lists, or more than {_MAX_VALUES} "
                "values: send several requests."
            )


def _outside(content: bytes) -> bytes:
    """What is outside of the texts of a body, if they are few, as long ones are of images; else all of it."""
    pieces, start = list[bytes](), 0
    for _ in range(_FEW_TEXTS):
        if (opening := content.find(b'"', start)) < 0:
            return b"".join([*pieces, content[start:]])
        pieces.append(content[start:opening])
        start = content.find(b'"', opening + 1) + 1
        if not start or content[start - 2] == ord("\\"):  # perhaps an escaped quote
            break
    return content


def convert(fields: dict[str, Any], model: type[T], *, strict: bool) -> T:
    """The fields as `model`; strict: unknown ones are errors."""
    known = model.__struct_fields__
    fields = translated(fields, known)
    for name in FIELDS.keys() & fields.keys():
        if FIELDS[name].is_refused and FIELDS[name].asks(fields[name]):
            raise wrong(name, f"is not supported: {FIELDS[name].text}")
    judge([name for name in fields if name not in known and name not in FIELDS], strict=strict)
    try:
        return msgspec.convert(with_numbers(fields, model), model, strict=True)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, RequestError):
            raise cause from None
        raise explained(error, model) from None


def judge(unknown: list[str], *, strict: bool) -> None:
    """Refuse fields that nothing of octavo has; not strict: say that they are ignored."""
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


def explained(error: msgspec.ValidationError, model: type[msgspec.Struct] | None = None) -> RequestError:
    """The same error, where msgspec says what it expected and where; the field's name is told apart.

    model: of the body; of its fields a wrong word comes with those that are known
    """
    text = str(error)
    place = _PLACE.search(text)
    if place is None:
        missing = re.search(r"missing required field `([^`]*)`", text)
        return RequestError(f"{text}.", missing[1] if missing else None)
    where = text[place.start() + len(" - at `$") : -1].lstrip(".")
    known = "" if model is None else ", ".join(_words(get_type_hints(model).get(place[1])))
    allowed = f" Use {known}." if known and "enum" in text and "." not in where else ""
    return RequestError(f"{where}: {text[: place.start()]}.{allowed}", place[1] or None)


def _words(annotation: Any) -> list[str]:
    """The words that a field may have."""
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for part in get_args(annotation) for word in _words(part)]


async def _refuse_when_full(request: Request) -> None:
    """Before any work is done for it: many may come when there is no room."""
    try:
        request.app.state.engines.check_admission()
    except OctavoError:
        if request.headers.get("connection", "").lower() == "close":
            await _skip(request)  # else closing resets it
        raise


async def _skip(request: Request) -> None:
    """Read what a body may have, and keep nothing."""
    left = request.app.state.config.max_request_bytes
    with suppress(ClientDisconnect):
        async for chunk in request.stream():
            left -= len(chunk)
            if left < 0:
                return


def _check_media_type(request: Request, *, any_type: bool) -> None:
    """Only JSON: what a form on another site can send is refused.

    any_type: only where a browser sends it, which tells by Origin or Sec-Fetch-Site where a POST comes from
    """
    is_program = not {"origin", "sec-fetch-site"}.intersection(request.headers)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or re.fullmatch(r"application/[\w.-]+\+json", media_type)
    if not is_json and not (any_type and is_program):
        raise HTTPError(415, "The body must be JSON: send Content-Type: application/json.", "Content-Type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HTTPError(415, "Compressed bodies are not read: send it as it is.", "Content-Encoding")


async def _read(request: Request, limit: int, grow_to: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            grow_to(size)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def _too_large(limit: int) -> HTTPError:
    return HTTPError(413, f"The body is larger than {limit} bytes, the server's max_request_bytes.")
