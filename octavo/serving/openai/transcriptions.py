"""/v1/audio/transcriptions and /v1/audio/translations: speech becomes text, segments or subtitles."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import FormData, UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.base.errors import RequestError, wrong
from octavo.frontend.speech.fallback import Fallback
from octavo.frontend.speech.model import Task
from octavo.frontend.speech.segments import Segment, srt, vtt
from octavo.frontend.speech.words import Word
from octavo.serving.body import borrow, explained, judge
from octavo.serving.caller import Caller
from octavo.serving.errors import ClientGone, HTTPError
from octavo.serving.form import open_form
from octavo.serving.openai.answers import encode, json_response
from octavo.serving.openai.protocol import CompletionRequest, Natural, Penalty, Positive, Seed
from octavo.serving.openai.speech import Transcript, Transcription
from octavo.serving.registry import Route
from octavo.serving.streaming import DONE, EventStream, event, leaving, unless_gone

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "stream"),
)
MAX_FILE_BYTES = 200 * 2**20
"""That any model may take: its option max_media_bytes mostly says less."""
_LISTS = ("timestamp_granularities", "include")
_WITH_TIMES = ("verbose_json", "srt", "vtt")


class TranscriptionFields(Struct, kw_only=True):
    """The fields of the form beside `file`; OpenAI's names, then vLLM's."""

    model: str | None = None
    language: str | None = None
    """A code such as en; left out, the model finds it out."""
    prompt: Annotated[str, Meta(max_length=10_000)] | None = None
    """A text that the speech goes on from, or that has its names and its style."""
    hotwords: Annotated[str, Meta(max_length=10_000)] | None = None
    """Words to expect; they stand before `prompt`."""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    timestamp_granularities: list[Literal["segment", "word"]] = []
    """With verbose_json; segment if it is left out."""
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    stream: bool = False
    """With json and text."""
    stream_include_usage: bool = False
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    temperature_increment_on_fallback: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """Windows with a poor transcript are decoded again, hotter by this, up to 1; 0 = never."""
    compression_ratio_threshold: Annotated[float, Meta(gt=0)] = 2.4
    logprob_threshold: Annotated[float, Meta(le=0)] = -1.0
    no_speech_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.6
    max_completion_tokens: Positive | None = None
    """Of each 30 seconds; the rest of the context if it is left out."""
    to_language: str | None = None
    """Of a translation: English, the only one that Whisper knows."""
    include: list[str] = []
    chunking_strategy: str | None = None
    """auto is the only one: long audio is always cut where it is quiet."""
    use_beam_search: bool = False
    """False alone: poor windows are decoded again instead."""
    n: Literal[1] = 1


class AudioUsage(Struct):
    """What is counted of audio."""

    seconds: Natural
    type: Literal["duration"] = "duration"


class TranscriptionJSON(Struct):
    """response_format=json."""

    text: str
    usage: AudioUsage


class SegmentJSON(Struct):
    """A few words. tokens: without times"""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None


class VerboseJSON(Struct):
    """response_format=verbose_json."""

    task: Task
    language: str
    duration: float
    text: str
    segments: list[SegmentJSON] | None
    words: list[Word] | None
    usage: AudioUsage


async def create_transcription(request: Request) -> Response:
    """Write down what a file of speech says. The body is a form with the fields `file`, `model` …"""
    return await _answer(request, "transcribe")


async def create_translation(request: Request) -> Response:
    """Write down in English what a file of speech says. The form is that of transcriptions."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: Task) -> Response:
    request.app.state.engines.check_admission()
    caller = Caller.of(request)
    try:
        async with open_form(request, MAX_FILE_BYTES, max_fields=64) as form:
            fields, upload = _fields_of(form, strict=caller.config.strict), _file_of(form)
            _check(fields, task)
            await borrow(request, fields.model)
            caller = caller.asking(fields.model)
            if (upload.size or 0) > (most := caller.engine.config.media.max_media_bytes):
                raise HTTPError(413, f"The file is larger than max_media_bytes={most}.", "file")
            content = await upload.read()
    except ClientDisconnect:
        raise ClientGone from None
    work = Transcription.of(
        caller,
        _sampling(fields),
        content,
        task,
        fields.language or "",
        " ".join(filter(None, (fields.hotwords, fields.prompt))),
        has_times=fields.response_format in _WITH_TIMES,
        fallback=_fallback(fields),
    )
    transcription = await unless_gone(leaving(request.receive), work)
    if fields.stream:
        return EventStream(_events(transcription, fields, caller), caller.config)
    wants_words = "word" in fields.timestamp_granularities
    made = await unless_gone(leaving(request.receive), transcription.whole(wants_words=wants_words))
    return _written(made, fields, task)


def _written(made: Transcript, fields: TranscriptionFields, task: Task) -> Response:
    match fields.response_format:
        case "text":
            return Response(made.text + "\n", media_type="text/plain")
        case "srt":
            return Response(srt(made.segments), media_type="application/x-subrip")
        case "vtt":
            return Response(vtt(made.segments), media_type="text/vtt")
        case "json":
            return json_response(TranscriptionJSON(made.text, _usage(made.duration)))
    wanted = fields.timestamp_granularities or ["segment"]
    segments = [_segment(i, s) for i, s in enumerate(made.segments)]
    return json_response(
        VerboseJSON(
            task,
            made.language,
            made.duration,
            made.text,
            segments if "segment" in wanted else None,
            made.words if "word" in wanted else None,
            _usage(made.duration),
        )
    )


def _segment(number: int, segment: Segment) -> SegmentJSON:
    return SegmentJSON(
        number,
        int(segment.start * 100),
        round(segment.start, 3),
        round(segment.end, 3),
        segment.text,
        segment.tokens,
        segment.temperature,
        segment.avg_logprob,
        segment.compression_ratio,
        segment.no_speech_prob,
    )


async def _events(
    transcription: Transcription, fields: TranscriptionFields, caller: Caller
) -> AsyncGenerator[bytes, None]:
    """Each event is one of OpenAI's (by its type) and a chunk of vLLM's (by its object) at once."""
    common: dict[str, Any] = {
        "id": f"transcribe-{caller.request_id}",
        "object": "transcription.chunk",
        "created": int(time.time()),
        "model": caller.model,
    }

    def chunk(kind: str, content: str, end: str | None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": end}
        return event(encode({"type": f"transcript.text.{kind}", **common, "choices": [choice], **more}))

    pieces = []
    async with aclosing(transcription.deltas()) as deltas:
        async for text in deltas:
            pieces.append(text)
            yield chunk("delta", text, None, delta=text)
    usage = {"usage": _usage(transcription.duration)} if fields.stream_include_usage else {}
    yield chunk("done", "", "stop", text="".join(pieces).strip(), **usage)
    yield DONE


def _usage(duration: float) -> AudioUsage:
    return AudioUsage(int(-(-duration // 1)))


def _fallback(fields: TranscriptionFields) -> Fallback:
    return Fallback(
        fields.temperature_increment_on_fallback,
        fields.compression_ratio_threshold,
        fields.logprob_threshold,
        fields.no_speech_threshold,
    )


def _sampling(fields: TranscriptionFields) -> CompletionRequest:
    given = {name: getattr(fields, name) for name in _SAMPLING}
    return CompletionRequest(model=fields.model, max_tokens=fields.max_completion_tokens, **given)


def _fields_of(form: FormData, *, strict: bool) -> TranscriptionFields:
    """Read the fields, whose values are texts. Raises RequestError."""
    given: dict[str, Any] = {}
    for name, value in form.multi_items():
        plain = name.removesuffix("[]")
        if isinstance(value, UploadFile):
            continue
        if plain in _LISTS:
            given.setdefault(plain, []).append(value)
        elif value or plain == "prompt":
            given[plain] = value
    known = TranscriptionFields.__struct_fields__
    judge([name for name in given if name not in known], strict=strict)
    given = {name: value for name, value in given.items() if name in known}
    try:
        return msgspec.convert(given, TranscriptionFields, strict=False)
    except msgspec.ValidationError as error:
        raise explained(error) from None


def _file_of(form: FormData) -> UploadFile:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise RequestError("The form needs a field file with a file name.", "file")
    return upload


def _check(fields: TranscriptionFields, task: Task) -> None:
    if fields.stream and fields.response_format not in ("json", "text"):
        raise RequestError(
            f"{fields.response_format} format doesn't support streaming case: use json or text.", "stream"
        )
    if fields.timestamp_granularities and fields.response_format != "verbose_json":
        raise wrong("timestamp_granularities", "need response_format=verbose_json")
    if fields.use_beam_search:
        raise wrong("use_beam_search", "must be false: beams would not follow the rules of time marks")
    if fields.to_language not in (None, "en") or (fields.to_language and task == "transcribe"):
        raise wrong("to_language", "must be en, of a translation")
    if fields.chunking_strategy not in (None, "auto"):
        raise RequestError('chunking_strategy must be "auto".', "chunking_strategy")


ROUTES = [
    Route(
        "/v1/audio/transcriptions",
        create_transcription,
        response_model=TranscriptionJSON,
        methods=("POST",),
        streams=True,
    ),
    Route(
        "/v1/audio/translations",
        create_translation,
        response_model=TranscriptionJSON,
        methods=("POST",),
        streams=True,
    ),
]
